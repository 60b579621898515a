"""The helpers for projects that embed the client, used as the README tells them to."""

from __future__ import annotations

import re

import pytest

from bucketplan_client.errors import ServerError, ServerUnreachable
from bucketplan_client.testing import InMemoryPlanServer
from bucketplan_client.transport import PlanClient
from bucketplan_core import make_plan
from bucketplan_core.plan import Plan
from tests.client.requests import small_request
from tests.client.test_cache import overriding_plan
from tests.support.paths import ROOT

SECTION = (ROOT / "client" / "README.md").read_text().partition("## Testing your integration")[2]


def test_the_readmes_test_passes_as_it_is_written():
    (code,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    request = small_request()
    exec(compile(code, "README", "exec"), {"request": request, "other_plan": overriding_plan()})


@pytest.mark.parametrize(
    "name", ["available", "num_busy", "defaults", "activate", "calls", "reports", "plans", "measured"]
)
def test_what_the_readme_names_is_there(name):
    assert f"`{name}" in SECTION
    assert hasattr(InMemoryPlanServer(), name)


def test_a_server_that_is_not_available_answers_nobody_on_its_socket():
    server = InMemoryPlanServer(available=False)
    with server.listening() as address, PlanClient(address, deadline_s=0.2) as client:
        with pytest.raises(ServerError):
            client.known_plan("0" * 64)
        server.available = True
        assert client.known_plan("0" * 64) is None


def test_over_a_socket_it_answers_what_it_answers_in_memory():
    request = small_request()
    server = InMemoryPlanServer()
    with server.listening() as address, PlanClient(address) as outside, server.client() as inside:
        assert outside.plan(request).encoded == inside.plan(request).encoded == make_plan(request).encoded
        assert Plan.decode(server.plans[request.signature].encoded).digest == make_plan(request).digest
    with pytest.raises(ServerUnreachable), PlanClient(address, deadline_s=0.2) as late:
        late.plan(request)
