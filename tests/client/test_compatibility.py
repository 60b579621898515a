"""Releases that differ: within one schema version they work together, across versions every rank says the same."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist

from bucketplan_client.errors import OpeningAborted, ServerRefused
from bucketplan_client.opening import open_attempt
from bucketplan_client.opening_places import PREFIX, Place
from bucketplan_client.opening_protocol import Hello
from bucketplan_client.store import JobStore
from bucketplan_client.testing import InMemoryPlanServer, MemoryAnswer
from bucketplan_core import make_plan
from bucketplan_core.attempt import RankReport
from bucketplan_core.request import SCHEMA_VERSION
from bucketplan_core.wire import pack, unpack
from tests.client.ranks import run_ranks
from tests.client.requests import small_request
from tests.client.test_opening import one_text, open_all

NEXT = SCHEMA_VERSION + 1


@dataclass
class LaterServer(InMemoryPlanServer):
    """A later release within this schema version: more headers, more keys beside what is hashed, more problems."""

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> MemoryAnswer:
        given = super().answer(method, path, headers, body)
        more = {**given.headers, "Bucketplan-Later": "yes", "Deprecation": "@1767225600", "Vary": "Accept, Later"}
        tree = unpack(given.body) if given.body else None
        if isinstance(tree, dict) and path.endswith("/attempts"):
            for override in tree["overrides"]:
                override["later"] = [1, 2]
            tree |= {"later": {"quota": 3}, "advice": None}
        elif isinstance(tree, dict) and "assessment" in tree:
            tree["assessment"] |= {"later_figure_ns": 5}
        elif isinstance(tree, dict) and "type" in tree:
            tree |= {"later": ["a"]}
        return MemoryAnswer(given.status, more, b"" if tree is None else pack(tree))


@dataclass
class EarlierServer(InMemoryPlanServer):
    """An earlier release within this schema version: no headers beside the necessary, no reports."""

    refused: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> MemoryAnswer:
        if path.endswith("/reports"):
            self.refused.append(path)
            problem = {"type": "about:blank", "title": "Not Found", "status": 404}
            return MemoryAnswer(404, {"Content-Type": "application/problem+msgpack"}, pack(problem))
        given = super().answer(method, path, headers, body)
        return MemoryAnswer(given.status, {"Content-Type": given.headers["Content-Type"]}, given.body)


@dataclass
class OtherSchemaServer(InMemoryPlanServer):
    """A release of the next schema version."""

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> MemoryAnswer:
        given = super().answer(method, path, headers, body)
        tree = unpack(given.body)
        assert isinstance(tree, dict)
        if "epoch" in tree:
            tree["epoch"] |= {"schema": NEXT, "unheard_of": 1}
        elif "decision" in tree:
            tree |= {"schema": NEXT, "unheard_of": 1}
        return MemoryAnswer(given.status, given.headers, pack(tree))


class TestWithinOneSchemaVersion:
    @pytest.mark.parametrize("kind", [LaterServer, EarlierServer])
    def test_job_opens_gets_its_override_and_its_plans(self, kind):
        request = small_request()
        overridden = small_request(num_params=5)
        server = kind()
        server.activate("llama", make_plan(overridden))
        results = open_all(
            server,
            use=lambda attempt: (
                attempt.plans.plan(request).digest,
                attempt.plans.plan(overridden).digest,
                attempt.source,
                dict(attempt.plans.taken),
                attempt.report(RankReport(rank=attempt.rank, slot="forward")),
            ),
        )
        digests = (make_plan(request).digest, make_plan(overridden).digest)
        assert {result[:3] for result in results.values()} == {(*digests, "server")}
        assert sum(result[3].get("server", 0) for result in results.values()) >= 1
        assert all(result[3]["override"] == 1 for result in results.values())

    def test_unknown_problem_reaches_the_caller_whole(self):
        with LaterServer().client() as client, pytest.raises(ServerRefused) as refused:
            client.get("/v1/of-a-later-release")
        assert refused.value.problem.extra == {"later": ["a"], "path": "/v1/of-a-later-release"}
        assert refused.value.problem.slug == "not-found"


class TestAcrossSchemaVersions:
    @pytest.mark.parametrize("on_unavailable", ["local", "unbucketed", "error"])
    def test_epoch_of_another_schema_aborts_on_all_ranks_alike_and_is_no_outage(self, on_unavailable):
        server = OtherSchemaServer()
        outcomes = open_all(server, on_unavailable=on_unavailable)
        text = one_text(outcomes)
        assert f"this build reads {SCHEMA_VERSION}" in text
        assert {error.remedy for error in outcomes.values()} == {
            "Use releases of client and server that read the same schema version"
        }
        assert len(server.calls) == 1, "asking again cures nothing"

    def test_plan_of_another_schema_is_refused_after_one_try(self):
        server = OtherSchemaServer()
        with server.client() as client, pytest.raises(ServerRefused) as refused:
            client.post_plan(small_request())
        assert refused.value.problem.slug == "schema-version"
        assert f"got {NEXT}" in str(refused.value)
        assert refused.value.num_tries == 1

    @pytest.mark.parametrize("odd", [0, 2])
    def test_rank_of_another_release_is_named_on_all_ranks(self, odd):
        """Its hello holds what the others cannot read; whether it leads or not, all get one outcome."""
        store, ranks = dist.HashStore(), range(3)

        def other_release() -> None:
            hello = unpack(Hello(rank=odd, capture=1, rewriter=1, schema=NEXT).encoded())
            assert isinstance(hello, dict)
            key = Place(job="llama", participants=tuple(ranks), name="0").key
            place = JobStore(store, prefix=PREFIX).scoped(key)
            place.put(f"hello/{odd}", pack({**hello, "unheard_of": {"more": 1}}))
            if odd == 0:
                reason = "the ranks do not agree on the schema version: rank 0 holds 2, ranks 1-2 hold 1"
                abort: dict[str, Any] = {"kind": "abort", "reason": reason, "missing": [], "odd": [0], "nonce": "n"}
                abort |= {"opened": None, "remedy": "Install one release", "source": "server", "unheard_of": True}
                place.put_once("outcome", pack(abort))

        thread = threading.Thread(target=other_release)
        thread.start()

        def body(rank: int, job_store: JobStore) -> Any:
            return open_attempt(
                InMemoryPlanServer().client(),
                groups={"fsdp": tuple(ranks)},
                job="llama",
                participants=tuple(ranks),
                deadline_s=20.0,
                store=store,
                rank=rank,
                name="0",
                disabled=False,
            )

        outcomes = run_ranks([rank for rank in ranks if rank != odd], body)
        thread.join()
        assert all(isinstance(error, OpeningAborted) for error in outcomes.values()), outcomes
        assert len({error.message for error in outcomes.values()}) == 1
        assert all(error.odd == (odd,) for error in outcomes.values())
        assert "schema version" in outcomes[1].message
        assert "Install one release" in outcomes[1].remedy
