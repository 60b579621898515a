"""What the client costs a rank: importing it beside torch, and fetching a known plan against a raw round trip."""

from __future__ import annotations

import compileall
import http.client
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import bucketplan_client
import bucketplan_core
from bucketplan_client.transport import PlanClient
from bucketplan_core.plan import Plan
from tests.benchmarks.harness import Result, side_by_side
from tests.client.requests import small_request
from tests.support.server import running_server

_PLAN_BYTES = 50_000
_CAP_BYTES = 600
_IMPORT_ROUNDS = 5
_FETCH_ROUNDS = 200

_MEASURE = """
import gc, sys, time
import torch, torch.distributed, torch.fx
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
gc.collect()
started, before = time.process_time(), resident()
import bucketplan_client
package = time.process_time() - started
for name in bucketplan_client.__all__:
    getattr(bucketplan_client, name)
names, names_mb = time.process_time() - started, (resident() - before) / 2**20
bucketplan_client.PlanClient("http://127.0.0.1:1").close()
client, client_mb = time.process_time() - started, (resident() - before) / 2**20
print(package * 1e3, names * 1e3, names_mb, client * 1e3, client_mb)
"""


def run() -> Result:
    _compile_to_bytecode()
    imports = [_import() for _ in range(_IMPORT_ROUNDS)]
    package_ms, import_ms, import_mb, client_ms, client_mb = map(statistics.median, zip(*imports, strict=True))
    extra_ms, ratio, decode_ms, plan_bytes = _fetch()
    return Result(
        {
            "import_package_ms": round(package_ms, 2),
            "import_ms": round(import_ms, 1),
            "import_mb": round(import_mb, 2),
            "import_and_client_ms": round(client_ms, 1),
            "import_and_client_mb": round(client_mb, 2),
            "fetch_extra_ms": round(extra_ms, 3),
            "fetch_decode_ms": round(decode_ms, 3),
            "fetch_ratio": round(ratio, 2),
            "fetch_plan_bytes": plan_bytes,
        },
        "import_package: CPU time that a fresh process with torch gains from the import alone, which loads each name "
        "when it is used, with bytecode at hand; "
        f"import: from every public name (median of {_IMPORT_ROUNDS} processes); import_and_client: "
        "until the first PlanClient is made too, which loads httpx. fetch: "
        "client.known_plan, verified and decoded, against http.client on a kept-alive connection to the same server, "
        f"alternating, median of {_FETCH_ROUNDS}; fetch_decode: the part of it that Plan.decode takes",
    )


def _compile_to_bytecode() -> None:
    """As pip does when it installs: a checkout has stale bytecode, and may be forbidden to write it at import."""
    for package in (bucketplan_client, bucketplan_core):
        for folder in package.__path__:
            compileall.compile_dir(folder, quiet=1)


def _import() -> list[float]:
    done = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True)
    return list(map(float, done.stdout.split()))


def _fetch() -> tuple[float, float, float, int]:
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder)) as server:
        with PlanClient(server.url) as client:
            num_params = 1_000
            request = small_request(num_params=num_params, cap_bytes=_CAP_BYTES)
            while len((plan := client.plan(request)).encoded) < _PLAN_BYTES:
                num_params = max(num_params + 1, num_params * _PLAN_BYTES // len(plan.encoded))
                request = small_request(num_params=num_params, cap_bytes=_CAP_BYTES)
            path = f"/v1/plans/{request.signature}"
            url = urlsplit(server.url)
            assert url.hostname is not None
            raw = http.client.HTTPConnection(url.hostname, url.port)

            def raw_round_trip() -> None:
                raw.request("GET", path, headers={"Accept": "application/msgpack"})
                assert raw.getresponse().read() == plan.encoded

            def through_the_client() -> None:
                assert client.known_plan(request.signature) is not None

            def decoding() -> None:
                Plan.decode(plan.encoded, expected_signature=request.signature)

            variants = {"raw": raw_round_trip, "client": through_the_client, "decode": decoding}
            times = side_by_side(variants, rounds=_FETCH_ROUNDS, warmup=5)
            raw.close()
        decode_ms = statistics.median(times["decode"]) / 1e6
        extra = [(mine - theirs) / 1e6 for mine, theirs in zip(times["client"], times["raw"], strict=True)]
        ratios = [mine / theirs for mine, theirs in zip(times["client"], times["raw"], strict=True)]
        return statistics.median(extra), statistics.median(ratios), decode_ms, len(plan.encoded)
