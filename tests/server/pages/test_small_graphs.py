"""Every legal request has its pages, however little is in it."""

import random
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bucketplan_core.collectives import Options
from bucketplan_core.plan import Plan
from bucketplan_core.request import Request
from tests.support import counts
from tests.support.documents import MSGPACK, plan_body
from tests.support.requests import random_hardware, random_profile, random_request
from tests.support.server import running_server


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with (
        running_server(tmp_path_factory.mktemp("small")) as server,
        httpx.Client(base_url=server.url, timeout=60) as found,
    ):
        yield found


def small(seed: int, num_segments: int | None = None, num_collectives: int | None = None) -> Request:
    """A random request with figures of the hardware, so that there is something to draw, of this size where given."""
    for number in range(seed, seed + 100_000):
        rng = random.Random(number)
        request = random_request(rng, max_collectives=4)
        request = request.with_options(
            replace(
                request.options,
                hardware=random_hardware(rng, [group.role for group in request.groups]),
                memory_budget_bytes=None,
            )
        )
        found = (request.num_segments, len(request.candidates) + len(request.fixed))
        if num_segments in (None, found[0]) and num_collectives in (None, found[1]):
            return request
    raise AssertionError("no such request")


def has_all_its_pages(client: httpx.Client, request: Request) -> None:
    profile = random_profile(random.Random(0), request)
    posted = client.post("/v1/plans", content=plan_body(request, profile), headers=MSGPACK)
    if posted.status_code == 422:
        return
    assert posted.status_code in (200, 201), posted.text
    page = f"/plans/{request.signature}"
    addresses = [page, f"{page}/pictures.json", f"/diff?a={request.signature}&b={request.signature}"]
    addresses += [f"/v1{page}/explain", f"/v1{page}/trace"]
    if request.candidates:
        addresses.append(f"{page}/buckets/0")
    for address in addresses:
        answer = client.get(address)
        # The figures of the hardware may leave out a group, without which no reason can be given.
        allowed = (200, 422) if address.startswith("/v1/") else (200,)
        assert answer.status_code in allowed, (address, answer.text)
    previewed = client.post(f"{page}/replan", data={"reason": "test", "strategy": "none"})
    assert previewed.status_code == 200, previewed.text


@pytest.mark.parametrize("num_collectives", [0, 1, 4])
@pytest.mark.parametrize("num_segments", [0, 1])
def test_a_graph_with_next_to_nothing_in_it_has_its_pages(client, num_segments, num_collectives):
    has_all_its_pages(client, small(0, num_segments, num_collectives))


@pytest.mark.soak
@settings(max_examples=counts.count(test=25, soak=500), deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_every_small_graph_has_its_pages(client, seed):
    has_all_its_pages(client, small(seed))


def test_a_rule_that_is_faster_by_gathering_early_is_told_to_do_so(client):
    texts = [beside_the_rules(client, seed) for seed in range(60)]
    told = ["for the backward pass before the last forward gather is used" in text for text, _ in texts]
    assert told == [is_faster for _, is_faster in texts]
    assert any(told)
    assert not all(told)


def beside_the_rules(client: httpx.Client, seed: int) -> tuple[str, bool]:
    """The page of an `auto` plan of gathers, and whether `size` has a shorter step."""
    rng = random.Random(seed)
    auto = Options(
        strategy="auto", planner="auto/1", placement="scheduled", bucket_cap_bytes=256, first_bucket_cap_bytes=256,
        prefetch=5,
    )  # fmt: skip
    kinds = ("fsdp_all_gather", "fsdp_all_gather_backward")
    request = random_request(rng, options=auto, max_collectives=8, kinds=kinds)
    hardware = random_hardware(rng, [group.role for group in request.groups])
    request = request.with_options(replace(auto, hardware=hardware))
    profile = random_profile(rng, request)
    posted = client.post("/v1/plans", content=plan_body(request, profile), headers=MSGPACK)
    if posted.status_code == 422:
        return "", False
    assessment = Plan.decode(posted.content).assessment
    size, simulated = assessment.get("baselines", {}).get("size", {}), assessment["simulated"]
    is_faster = simulated is not None and size["step_ns"] < simulated["step_ns"]
    return client.get(f"/plans/{request.signature}").text, is_faster
