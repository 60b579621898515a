"""Schemathesis calls everything that the OpenAPI description describes, rightly and wrongly, and finds no failure."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from bucketplan_core.attempt import RankReport
from bucketplan_core.collectives import Options
from bucketplan_core.wire import unpack
from tests.server.test_attempts import open_attempt, report
from tests.server.test_audit_reads import HARDWARE
from tests.server.test_profiles import measured
from tests.support import counts
from tests.support.documents import MSGPACK, plan_body, profile_of, small_request
from tests.support.server import RunningServer, running_server

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "negative_data_rejection",
    "unsupported_method",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    # A post of a body that describes nothing must not hold a test for as long as a real planning may take.
    with running_server(tmp_path_factory.mktemp("openapi"), plan_wait_seconds=2) as running:
        yield running


@pytest.fixture(scope="module")
def parameters(server: RunningServer) -> dict[str, object]:
    """Names of things that exist, so that calls get as far as an answer."""
    with httpx.Client(base_url=server.url) as client:
        request = small_request(options=Options(strategy="size", planner="size/1", hardware=HARDWARE))
        body = plan_body(request, profile_of(request))
        made = unpack(client.post("/v1/plans", content=body, headers=MSGPACK).raise_for_status().content)
        epoch = unpack(open_attempt(client, "described", "a").content)["epoch_id"]
        report(client, "described", 1, RankReport(rank=0, slot="joint", signature=request.signature))
        client.put("/v1/profiles/lab", json={"profile": measured("lab"), "reason": "new"}).raise_for_status()
    return {
        "path.attempt": 1,
        "path.digest": made["digest"],
        "path.epoch": epoch,
        "path.job": "described",
        "path.name": "lab",
        "path.revision": 1,
        "path.signature": request.signature,
        "query.a": request.signature,
        "query.b": request.signature,
    }


def schemathesis(server: RunningServer, folder: Path, parameters: dict[str, object], *, seed: int) -> None:
    """Run it as a person would; fails with its report."""
    settings = folder / "schemathesis.toml"
    lines = [f'"{name}" = {value if isinstance(value, int) else repr(value)}' for name, value in parameters.items()]
    # A wrong body that is too large besides is refused by its size.
    refused = '["400", "401", "403", "404", "405", "406", "409", "413", "415", "422"]'
    checks = ["[checks]", f"negative_data_rejection.expected-statuses = {refused}"]
    settings.write_text("\n".join(["[parameters]", *lines, *checks, ""]))
    done = subprocess.run(
        [
            Path(sys.executable).with_name("schemathesis"),
            f"--config-file={settings}",
            "run",
            f"{server.url}/openapi.json",
            f"--checks={','.join(CHECKS)}",
            f"--seed={seed}",
            f"--max-examples={counts.count(test=3, soak=100)}",
            "--phases=coverage,fuzzing",
            "--request-timeout=60",
            "--no-color",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]


@pytest.mark.soak
def test_calls_of_what_exists_are_answered_as_described(server, tmp_path, parameters):
    schemathesis(server, tmp_path, parameters, seed=1)


@pytest.mark.soak
def test_calls_of_anything_are_answered_as_described(server, tmp_path):
    schemathesis(server, tmp_path, {}, seed=2)
