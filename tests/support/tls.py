"""A certificate authority made for one test, and a server's certificate by it."""

from dataclasses import dataclass
from pathlib import Path

import trustme

__all__ = ["TlsFiles", "make_tls_files"]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the authority that callers trust, the server's certificate chain and its key."""

    authority: Path
    certificate: Path
    key: Path


def make_tls_files(folder: Path) -> TlsFiles:
    """Files for a server at 127.0.0.1 and localhost."""
    files = TlsFiles(folder / "authority.pem", folder / "server.pem", folder / "server.key")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    authority.cert_pem.write_to_path(files.authority)
    for blob in issued.cert_chain_pems:
        blob.write_to_path(files.certificate, append=True)
    issued.private_key_pem.write_to_path(files.key)
    return files
