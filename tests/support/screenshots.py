"""The pictures of the READMEs: a real server with the data of a small fleet, photographed in a real Chromium.

python -m tests.support.screenshots [FOLDER]        writes PNG files, into server/docs/ unless told otherwise

The graphs are the recorded ones where their folder is laid out, else generated ones of similar size.
"""

import hashlib
import io
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page

from bucketplan_core.attempt import OPEN_SLOT, AttemptRequest, RankReport
from bucketplan_core.collectives import Options
from bucketplan_core.presets import GroupShape, resolve_preset
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from bucketplan_core.wire import pack, unpack
from bucketplan_server import cli_tokens
from bucketplan_server.settings import load_settings
from tests.benchmarks.bench_planner import generate
from tests.support.browser import chromium, follow
from tests.support.documents import MSGPACK, plan_body
from tests.support.graphs import graph_names, load_graph
from tests.support.paths import ROOT
from tests.support.server import RunningServer, running_server

FOLDER = ROOT / "server" / "docs"
MAX_BYTES = 150_000
_WIDTH = 1_200
_PHONE = 390
_COLOURS = 96
_ROLES = {1: ("fsdp",), 2: ("fsdp", "replicate"), 3: ("dp_shard", "ep", "ep_shard")}
Graph = tuple[Request, CostProfile]


@dataclass(frozen=True, slots=True)
class Fleet:
    """A server with plans, jobs and a divergence, and what the pictures look at."""

    server: RunningServer
    operator: str
    plan: str
    earlier: str
    diverged: str


@contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    """A server in `folder` with four jobs: one each that agrees, changed, misses ranks and diverged."""
    database = str(folder / "bucketplan.db")
    settings = load_settings(database=database)
    secrets = {
        name: cli_tokens.create(settings, name, role=role, namespace=None, expires=None, reason="for the pictures")
        for name, role in (("ana", "operator"), ("cluster-7", "rank"))
    }
    with running_server(folder, database=database, stall_seconds=0.01) as server:
        ranks = httpx.Client(base_url=server.url, headers=_bearer(secrets["cluster-7"]), timeout=120)
        ana = httpx.Client(base_url=server.url, headers=_bearer(secrets["ana"]), timeout=120)
        with ranks, ana:
            yield _filled(server, secrets["ana"], ranks, ana)


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def _filled(server: RunningServer, operator: str, ranks: httpx.Client, ana: httpx.Client) -> Fleet:
    large, mixture, small = (
        _graph("tt_llama3_8b_hsdp2x32", 32, 32, 4),
        _graph("tt_dsv3_16b_fsdp64_ep8", 27, 64, 8),
        _graph("tt_llama3_4l", 4, 8, 1),
    )
    sized = _planned(ranks, large, strategy="size", placement="scheduled")
    _attempt(ranks, "llama3-8b-pretrain", [sized] * 64, {"strategy": "size"})
    auto = _planned(ranks, large, strategy="auto", placement="scheduled", memory_budget_bytes=48 * 2**30)
    _attempt(ranks, "llama3-8b-pretrain", [auto] * 64, {"strategy": "auto", "placement": "scheduled"})
    _attempt(ranks, "dsv3-16b-ep8", [_planned(ranks, mixture, strategy="auto", placement="scheduled")] * 64, {})
    _attempt(ranks, "llama3-8b-longctx", [auto] * 62, {"strategy": "auto"}, num_expected=64)
    usual = _planned(ranks, small, strategy="size")
    # One host runs another precision policy: a real way to hang a job.
    request, profile = small
    odd = [replace(c, dtype="float32") if k == 10 else c for k, c in enumerate(request.candidates)]
    other = _planned(ranks, (replace(request, candidates=tuple(odd)), profile), strategy="size")
    _attempt(ranks, "llama3-debug", [usual] * 8, {"strategy": "size"})
    _attempt(ranks, "llama3-debug", [other if rank == 5 else usual for rank in range(8)], {"strategy": "size"})
    path = f"/v1/plans/{auto}"
    for address, body in (
        ("/revisions", {"options": {"strategy": "size"}, "reason": "buckets by size while ticket 4711 is looked into"}),
        ("/activate", {"revision": 2, "reason": "ticket 4711: steps vary from node to node"}),
        ("/activate", {"revision": 1, "reason": "ticket 4711 was a bad cable, not the plan"}),
    ):
        done = ana.post(path + address, content=pack(body), headers=MSGPACK)
        assert done.is_success, done.text
    return Fleet(server, operator, plan=auto, earlier=sized, diverged="/jobs/llama3-debug/attempts/2")


def _graph(name: str, num_layers: int, ranks: int, nodes: int) -> Graph:
    request, profile = load_graph(name) if name in graph_names() else generate(num_layers, ranks=ranks, nodes=nodes)
    # Names that sort as the recorded ones do, since lanes are numbered by them.
    roles = dict(zip((group.role for group in request.groups), _ROLES[len(request.groups)], strict=True))
    return (
        replace(
            request,
            groups=tuple(replace(group, role=roles[group.role]) for group in request.groups),
            candidates=tuple(replace(c, group=roles[c.group]) for c in request.candidates),
            fixed=tuple(replace(f, group=roles.get(f.group, f.group)) for f in request.fixed),
        ),
        profile,
    )


def _planned(client: httpx.Client, graph: Graph, **options: Any) -> str:
    """Have the server plan the graph with the figures of an H100 fleet; answers the signature."""
    request, profile = graph
    shapes = {group.role: GroupShape(group.size, group.nodes) for group in request.groups}
    hardware = resolve_preset("h100-ndr" if any(group.nodes > 1 for group in request.groups) else "h100-nvlink", shapes)
    wanted = Options(**{"planner": f"{options['strategy']}/1", "hardware": hardware, **options})
    asked = request.with_options(wanted)
    posted = client.post("/v1/plans", content=plan_body(asked, profile), headers=MSGPACK)
    assert posted.is_success, posted.text
    return asked.signature


def _attempt(
    client: httpx.Client, job: str, signatures: Sequence[str], options: dict[str, Any], num_expected: int | None = None
) -> None:
    """One start of `job`, on which rank N opens and holds the Nth signature."""
    members = tuple(range(num_expected or len(signatures)))
    body = AttemptRequest(key=hashlib.sha256(repr((job, signatures)).encode()).hexdigest()[:16],
                          participants={"fsdp": (members,)}, options=options, topology={"fsdp": len(members) // 8},
                          uuid="start")  # fmt: skip
    opened = client.post(f"/v1/jobs/{job}/attempts", content=pack(body.to_wire()), headers=MSGPACK)
    assert opened.is_success, opened.text
    reports = []
    for rank, signature in enumerate(signatures):
        assert client.get(f"/v1/plans/{signature}", headers={"Accept": MSGPACK["Accept"]}).is_success
        digest = hashlib.sha256(signature.encode()).hexdigest()
        reports.append(RankReport(rank=rank, slot=OPEN_SLOT, uuid="start").to_wire())
        held = RankReport(
            rank=rank, slot="joint", signature=signature, digests={"fsdp": digest}, members={"fsdp": members}
        )
        reports.append(held.to_wire())
    number = unpack(opened.content)["attempt"]
    sent = client.post(f"/v1/jobs/{job}/attempts/{number}/reports", content=pack({"reports": reports}), headers=MSGPACK)
    assert sent.is_success, sent.text


def take(folder: Path) -> list[Path]:
    """Writes the pictures into `folder` and answers where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pictures") as data, fleet(Path(data)) as shown, chromium() as browser:
        return list(_pictures(folder, shown, browser))


def _pictures(folder: Path, shown: Fleet, browser: Browser) -> Iterator[Path]:
    plan = f"/plans/{shown.plan}"
    with _tab(browser, shown, _WIDTH) as tab:
        tab.goto("/events")
        follow(tab.get_by_role("button", name="Verify now"))
        yield _save(tab, folder / "audit-log.png", height=900)
        tab.goto("/")
        yield _save(tab, folder / "overview.png", height=1_000)
        tab.goto(plan)
        yield _save(tab, folder / "plan.png", height=1_000)
        tab.goto(f"{plan}?order=exposed")
        yield _save(tab, folder / "buckets.png", start=tab.locator("#buckets"), height=700)
        tab.goto(f"/diff?a={shown.earlier}&b={shown.plan}")
        yield _save(tab, folder / "diff.png", height=900)
        tab.goto(shown.diverged)
        yield _save(tab, folder / "divergence.png", height=800)
    with _tab(browser, shown, _WIDTH, "dark") as tab:
        tab.goto(plan)
        yield _save(tab, folder / "plan-dark.png", height=1_000)
    with _tab(browser, shown, _PHONE) as tab:
        tab.goto(shown.diverged)
        yield _save(tab, folder / "divergence-phone.png", height=1_000)


@contextmanager
def _tab(browser: Browser, shown: Fleet, width: int, scheme: Any = "light") -> Iterator[Page]:
    with browser.new_context(
        base_url=shown.server.url, color_scheme=scheme, viewport={"width": width, "height": 800}
    ) as context:
        tab = context.new_page()
        tab.goto("/login")
        tab.get_by_label("Token").fill(shown.operator)
        follow(tab.get_by_role("button", name="Sign in"))
        tab.get_by_role("button", name="Log out").wait_for()
        yield tab


def _save(tab: Page, path: Path, *, height: int, start: Any = None) -> Path:
    """The page from its top, or from an element on, at most `height` high, with few enough colours to be small."""
    top = 0 if start is None else start.evaluate("node => Math.floor(node.getBoundingClientRect().top + scrollY) - 12")
    full = tab.evaluate("document.documentElement.scrollHeight")
    width = tab.evaluate("document.documentElement.clientWidth")
    clip = {"x": 0, "y": top, "width": width, "height": min(height, full - top)}
    with Image.open(io.BytesIO(tab.screenshot(full_page=True, clip=clip))) as taken:  # type: ignore[arg-type]  # a dict with the keys of FloatRect
        few = taken.convert("RGB").quantize(_COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        few.save(path, optimize=True)
    size = path.stat().st_size
    assert size <= MAX_BYTES, f"{path.name} has {size} bytes, at most {MAX_BYTES} are kept in the repository"
    return path


if __name__ == "__main__":
    for written in take(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER):
        print(f"{written}  {written.stat().st_size:,} bytes")
