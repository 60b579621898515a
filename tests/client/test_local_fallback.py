"""Plans made without the server: the same bytes in every process, whatever its hash seed, locale or time zone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bucketplan_core import make_plan
from tests.client.requests import small_request
from tests.core.record_schema import profile_of, requests
from tests.support.paths import ROOT
from tests.support.server import running_server

FALLBACK = """
import hashlib, sys
from bucketplan_client.errors import Where
from bucketplan_client.fallback import AttemptPlans
from bucketplan_client.opening_protocol import Opened
from bucketplan_core.epoch import Epoch
from tests.client.requests import small_request
from tests.core.record_schema import profile_of, requests

for name, request in [("plain", small_request(num_params=40)), *requests().items()]:
    epoch = Epoch.build(job="j", options=request.options, topology={}, overrides={})
    plans = AttemptPlans(Opened(epoch=epoch), source="local", client=None, cache=None, store=None, where=Where())
    plan = plans.plan(request, profile_of(request))
    assert dict(plans.taken) == {"local": 1}
    print(name, request.signature, plan.digest, hashlib.sha256(plan.encoded).hexdigest())
"""
SETTINGS = {
    "plain": {},
    "C": {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "Turkish": {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8", "TZ": "Europe/Istanbul"},
    "German": {"LC_ALL": "de_DE", "LANG": "de_DE", "TZ": "Asia/Kolkata", "PYTHONHASHSEED": "1"},
    "seeds": {"PYTHONHASHSEED": "4294967295", "PYTHONOPTIMIZE": "1"},
}


def plan_elsewhere(settings: dict[str, str]) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, "-c", FALLBACK],
        env={**environment, "PYTHONHASHSEED": "random", **settings, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def here() -> str:
    return plan_elsewhere({})


@pytest.mark.parametrize("name", SETTINGS)
def test_processes_of_any_setting_make_the_same_bytes(here, name):
    assert here.count("\n") == len(requests()) + 1
    assert plan_elsewhere(SETTINGS[name]) == here


def test_the_server_gives_the_same_bytes(here, tmp_path):
    from bucketplan_client.transport import PlanClient

    digests = {line.split()[1]: line.split()[2] for line in here.splitlines()}
    with running_server(tmp_path) as server, PlanClient(server.url) as client:
        for request in (small_request(num_params=40), *requests().values()):
            plan = client.plan(request, profile_of(request))
            assert plan.digest == digests[request.signature] == make_plan(request, profile_of(request)).digest
