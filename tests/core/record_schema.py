"""Writes the documents of the current schema version to tests/core/recorded; see the README there.

python -m tests.core.record_schema
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from bucketplan_core import CostProfile, Options, Request, make_plan
from bucketplan_core.epoch import Epoch
from bucketplan_core.groups import group_digests
from bucketplan_core.planners import PLANNERS
from bucketplan_core.profile import WorkClass
from bucketplan_core.request import SCHEMA_VERSION
from tests.core.test_decoding import HARDWARE, small_request

RECORDED = Path(__file__).parent / "recorded"


def requests() -> dict[str, Request]:
    """One request for each planner and placement: gathers, a reduce-scatter, fixed collectives, module scopes."""
    found: dict[str, Request] = {}
    for planner in PLANNERS:
        strategy = planner.version.split("/", 1)[0]
        for placement in ("original", "scheduled"):
            options = Options(
                strategy=strategy, planner=planner.version, placement=placement, bucket_cap_bytes=64, hardware=HARDWARE
            )
            plain = small_request()
            scoped = [
                replace(candidate, scope=f"layers.{index // 2}") if strategy == "module" else candidate
                for index, candidate in enumerate(plain.candidates)
            ]
            found[f"{planner.version.replace('/', '-')}-{placement}"] = Request.build(
                num_segments=plain.num_segments,
                groups=plain.groups,
                candidates=scoped,
                fixed=plain.fixed,
                options=options,
            )
    return found


def profile_of(request: Request) -> CostProfile:
    """Work and live bytes of every segment, so that planners that look at costs have some."""
    segments = range(request.num_segments)
    return replace(
        CostProfile.empty(request),
        work=(
            WorkClass(
                name="matmul:bfloat16",
                flops=tuple(10**10 * (index + 1) for index in segments),
                bytes_moved=tuple(4_000 for _ in segments),
            ),
        ),
        live_bytes=tuple(1_000 * (index + 1) for index in segments),
    )


def main() -> int:
    folder = RECORDED / f"schema-{SCHEMA_VERSION}"
    if folder.exists():
        print(f"{folder} is recorded already and stays as it is", file=sys.stderr)
        return 1
    folder.mkdir(parents=True)
    names: dict[str, dict[str, object]] = {}
    for name, request in requests().items():
        profile = profile_of(request)
        plan = make_plan(request, profile)
        epoch = Epoch.build(
            job="recorded", options=request.options, topology={"dp": 1}, overrides={request.signature: plan.digest}
        )
        for kind, data in (
            ("request", request.encoded),
            ("profile", profile.encoded),
            ("plan", plan.encoded),
            ("epoch", epoch.encoded),
        ):
            (folder / f"{name}.{kind}").write_bytes(data)
        names[name] = {
            "epoch": epoch.id,
            "groups": group_digests(request, plan.decision),
            "plan": plan.digest,
            "profile": profile.digest,
            "signature": request.signature,
        }
    (folder / "names.json").write_text(json.dumps(names, indent=2, sort_keys=True) + "\n")
    print(f"wrote {len(names)} requests to {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
