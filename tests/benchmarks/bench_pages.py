"""What pages cost a real server, from the request to the last byte of HTML: a plan of 3,410 candidates, and long lists.

The lists are those of a store with 1,000 jobs, 1,000 attempts of one of them, 1,000 revisions of one signature, 2,000
plans of 344 candidates and 100,000 events. Each page is read first by a server that has just started, then again.
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import httpx
import psutil

from bucketplan_core.presets import resolve_preset
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from tests.benchmarks.bench_planner import _shapes, generate
from tests.benchmarks.harness import Result
from tests.support.crowded import JOB, Crowd, crowded_server
from tests.support.documents import MSGPACK, plan_body
from tests.support.server import running_server

ROUNDS = 7
CROWD = Crowd(num_jobs=1_000, num_attempts=1_000, num_revisions=1_000, num_plans=2_000, num_events=100_000)


def run() -> Result:
    plan, lists = _plan(), _lists()
    return Result(
        {**plan, **lists},
        f"the plan: least of {ROUNDS} rounds; CPU of the server and its planning process, in steps of the kernel's 10 "
        "ms; lists: that of the page that took longest, first and when read again, and the largest page",
    )


def _planned(num_layers: int) -> tuple[Request, CostProfile]:
    request, profile = generate(num_layers)
    hardware = resolve_preset("h100-ndr", _shapes(request))
    options = replace(request.options, strategy="size", planner="size/1", placement="scheduled", hardware=hardware)
    return replace(request, options=options), profile


def _plan() -> dict[str, int]:
    request, profile = _planned(81)
    with (
        tempfile.TemporaryDirectory(prefix="pages") as folder,
        running_server(Path(folder)) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        posted = client.post("/v1/plans", content=plan_body(request, profile), headers=MSGPACK)
        assert posted.status_code == 201, posted.text
        figures: list[tuple[int, int]] = []
        page = ""
        for _ in range(ROUNDS):
            before, began = _cpu_ns(server.pid), time.perf_counter_ns()
            answer = client.get(f"/plans/{request.signature}")
            took = time.perf_counter_ns() - began
            figures.append((_cpu_ns(server.pid) - before, took))
            assert answer.status_code == 200
            page = answer.text
    assert page.count("<svg") >= 3
    return {
        "cpu_ms": min(cpu for cpu, _ in figures) // 1_000_000,
        "wall_ms": min(wall for _, wall in figures) // 1_000_000,
        "num_candidates": len(request.candidates),
        "html_bytes": len(page.encode()),
        "num_shapes": page.count("<rect") + page.count("<path"),
    }


def _lists() -> dict[str, int]:
    request, profile = _planned(8)
    signature = request.signature
    addresses = (
        "/", "/plans", "/plans?parameter=in-no-plan", "/plans?strategy=none", "/plans?group=fsdp", f"/plans?job={JOB}",
        "/jobs", "/jobs?name=zz", f"/jobs/{JOB}", f"/jobs/{JOB}?before=500", f"/jobs/{JOB}/attempts/1000", "/events",
        "/events?kind=token.revoked", f"/events?job={JOB}", f"/events?signature={signature}", f"/plans/{signature}",
        f"/plans/{signature}?revisions=20", f"/plans/{signature}?revision=500",
        f"/diff?a={signature}&b={signature}&revision_a=1&revision_b=900",
    )  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="pages") as folder,
        crowded_server(Path(folder), request, profile, CROWD) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        costs: list[tuple[int, int]] = []
        sizes: list[int] = []
        for _ in range(2):
            costs.append((0, 0))
            for address in addresses:
                before, began = _cpu_ns(server.pid), time.perf_counter_ns()
                answer = client.get(address)
                took = time.perf_counter_ns() - began
                assert answer.status_code == 200, answer.text
                cost = (_cpu_ns(server.pid) - before, took)
                print(address.replace(signature, "SIGNATURE"), f"cpu {cost[0] / 1e6:.0f} ms, {took / 1e6:.0f} ms")
                costs[-1] = max(costs[-1], cost)
                sizes.append(len(answer.content))
    return {
        "lists_first_cpu_ms": costs[0][0] // 1_000_000,
        "lists_again_cpu_ms": costs[1][0] // 1_000_000,
        "lists_first_wall_ms": costs[0][1] // 1_000_000,
        "lists_again_wall_ms": costs[1][1] // 1_000_000,
        "lists_most_html_bytes": max(sizes),
    }


def _cpu_ns(pid: int) -> int:
    """CPU that the process and its children have used."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(int((times.user + times.system) * 1e9) for times in (process.cpu_times() for process in processes))
