"""What the page of a plan of 3,410 candidates costs a real server, from the request to the last byte of HTML."""

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import httpx
import psutil

from bucketplan_core.presets import resolve_preset
from tests.benchmarks.bench_planner import _shapes, generate
from tests.benchmarks.harness import Result
from tests.support.documents import MSGPACK, plan_body
from tests.support.server import running_server

ROUNDS = 7


def run() -> Result:
    request, profile = generate(81)
    hardware = resolve_preset("h100-ndr", _shapes(request))
    options = replace(request.options, strategy="size", planner="size/1", placement="scheduled", hardware=hardware)
    request = replace(request, options=options)
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
    return Result(
        {
            "cpu_ms": min(cpu for cpu, _ in figures) // 1_000_000,
            "wall_ms": min(wall for _, wall in figures) // 1_000_000,
            "num_candidates": len(request.candidates),
            "html_bytes": len(page.encode()),
            "num_shapes": page.count("<rect") + page.count("<path"),
        },
        f"least of {ROUNDS} rounds; CPU of the server and its planning process, in steps of the kernel's 10 ms clock",
    )


def _cpu_ns(pid: int) -> int:
    """CPU that the process and its children have used."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(int((times.user + times.system) * 1e9) for times in (process.cpu_times() for process in processes))
