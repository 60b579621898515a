"""Every address that is read answers in both encodings, with the same content."""

import threading

import httpx
import pytest

from bucketplan_core.attempt import AttemptRequest, RankReport
from bucketplan_core.collectives import Options
from bucketplan_core.wire import digest_of, from_json, pack, to_json, unpack
from bucketplan_server.http import answers
from tests.server.test_attempts import open_attempt, report
from tests.server.test_audit_reads import HARDWARE
from tests.server.test_profiles import measured
from tests.support.documents import MSGPACK, plan_body, profile_of, small_request
from tests.support.inprocess import in_process
from tests.support.server import running_server

QUERIES = {"/v1/diff": "?a={signature}&b={signature}"}
NOT_A_DOCUMENT = {"/metrics"}
SEALED = {"/v1/plans/{signature}": "decision"}
"""Reads whose MessagePack holds a document still encoded, so that its bytes can be hashed."""


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A client of a server that holds one of everything, and what its addresses are made of."""
    with running_server(tmp_path_factory.mktemp("reads")) as server, httpx.Client(base_url=server.url) as client:
        request = small_request(options=Options(strategy="size", planner="size/1", hardware=HARDWARE))
        body = plan_body(request, profile_of(request))
        plan = unpack(client.post("/v1/plans", content=body, headers=MSGPACK).raise_for_status().content)
        epoch = unpack(open_attempt(client, "reads", "a").content)["epoch_id"]
        report(client, "reads", 1, RankReport(rank=0, slot="joint", signature=request.signature))
        client.put("/v1/profiles/lab", json={"profile": measured("lab"), "reason": "new"}).raise_for_status()
        yield (
            client,
            {
                "attempt": 1,
                "digest": plan["digest"],
                "epoch": epoch,
                "job": "reads",
                "name": "lab",
                "revision": 1,
                "signature": request.signature,
            },
        )


def reads(client: httpx.Client) -> list[str]:
    paths = client.get("/openapi.json").json()["paths"]
    return sorted(path for path, calls in paths.items() if "get" in calls and path not in NOT_A_DOCUMENT)


def test_every_read_answers_alike_in_both_encodings(reader):
    client, names = reader
    paths = reads(client)
    assert {"/v1/plans", "/v1/events", "/v1/plans/{signature}/trace", "/v1/profiles/{name}"} <= set(paths)
    for path in paths:
        address = (path + QUERIES.get(path, "")).format(**names)
        packed = client.get(address, headers={"Accept": "application/msgpack"})
        plain = client.get(address, headers={"Accept": "application/json"})
        assert (packed.status_code, plain.status_code) == (200, 200), (address, packed.content[:300])
        assert packed.headers["content-type"] == "application/msgpack", address
        found, shown = from_json(to_json(unpack(packed.content))), from_json(plain.content)
        if path in SEALED or path.endswith("/revisions/{revision}"):
            # The decision travels as the bytes that its digest hashes.
            assert digest_of(bytes.fromhex(found.pop("decision"))) == shown["digest"]
            shown.pop("decision")
        if path == "/v1/jobs/{job}/attempts/{attempt}":
            # It says how long somebody is waited for.
            found, shown = set(found), set(shown)
        assert found == shown, address


def test_a_missing_thing_is_404_everywhere(reader):
    client, names = reader
    gone = {**names, "signature": "0" * 64, "digest": "0" * 64, "epoch": "0" * 64, "name": "nobody", "attempt": 9}
    for path in reads(client):
        if "{" in path + QUERIES.get(path, "") and path != "/v1/jobs/{job}/attempts":
            address = (path + QUERIES.get(path, "")).format(**gone)
            for accept, read in (("application/msgpack", unpack), ("application/json", from_json)):
                answer = client.get(address, headers={"Accept": accept})
                assert answer.status_code == 404, address
                assert read(answer.content)["status"] == 404


def test_no_large_answer_is_encoded_on_the_event_loop(tmp_path, monkeypatch):
    encoded: list[tuple[int, int]] = []

    def recorded(encode):
        def call(*arguments, **options) -> bytes:
            body = encode(*arguments, **options)
            encoded.append((threading.get_ident(), len(body)))
            return body

        return call

    for name in ("pack", "to_json"):
        monkeypatch.setattr(answers, name, recorded(getattr(answers, name)))
    options = Options(strategy="size", planner="size/1", hardware=HARDWARE)
    request = small_request(options=options, num_candidates=400)
    names = {"attempt": 1, "job": "reads", "revision": 1, "signature": request.signature}
    with in_process([str(tmp_path / "store.db")], planner_processes=1) as servers:

        async def scenario() -> None:
            plan = await servers.call("POST", "/v1/plans", content=plan_body(request), **MSGPACK)
            names["digest"] = unpack(plan.content)["digest"]
            opening = AttemptRequest(key="a", participants={"fsdp": (tuple(range(4_000)),)})
            opened = await servers.call("POST", "/v1/jobs/reads/attempts", content=pack(opening.to_wire()), **MSGPACK)
            names["epoch"] = unpack(opened.content)["epoch_id"]
            for path in (await servers.call("GET", "/openapi.json")).json()["paths"].items():
                if "get" in path[1] and path[0] not in NOT_A_DOCUMENT and "{name}" not in path[0]:
                    address = (path[0] + QUERIES.get(path[0], "")).format(**names)
                    for accept in ("application/json", "application/msgpack"):
                        assert (await servers.call("GET", address, accept=accept)).status_code == 200, address

        servers.run(scenario())
    large = [thread for thread, size in encoded if size > 10_000]
    assert len(large) >= 5
    assert threading.get_ident() not in large
