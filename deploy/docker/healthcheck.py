#!/usr/bin/env python3
"""Exit status 0 while the server of this container is ready, 1 otherwise; the standard library is all it needs."""

import os
import ssl
import sys
import urllib.request


def main() -> int:
    """Ask `/readyz`, or the path that is given, on the port and with the scheme that the server's settings say."""
    path = sys.argv[1] if len(sys.argv) > 1 else "/readyz"
    scheme = "https" if os.environ.get("BUCKETPLAN_TLS_CERTIFICATE") else "http"
    url = f"{scheme}://127.0.0.1:{os.environ.get('BUCKETPLAN_PORT') or 8321}{path}"
    # The certificate names the service and not 127.0.0.1, and nothing secret is sent.
    context = ssl._create_unverified_context()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(url, timeout=3) as answer:
            return 0 if answer.status == 200 else 1
    except OSError as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
