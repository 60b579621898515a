"""Bad input: a 4xx that names the field, and nothing stored, on either database."""

import asyncio
import contextlib
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
from sqlalchemy import text

from bucketplan_core.wire import digest_of, pack, to_json, unpack
from bucketplan_server.store.engine import open_for_reading
from tests.support.documents import JSON, MSGPACK, plan_body, profile_of, small_request
from tests.support.postgres import running_postgres
from tests.support.server import RunningServer, running_server

REQUEST = small_request(100)
PROFILE = profile_of(REQUEST)


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """PostgreSQL refuses text that SQLite takes, U+0000 above all: what is let through there is a 5xx here."""
    folder = tmp_path_factory.mktemp("server")
    with contextlib.ExitStack() as stack:
        settings: dict[str, object] = {"max_body_bytes": 256 * 1024}
        if request.param == "postgres":
            settings["database"] = stack.enter_context(running_postgres()).new_database()
        yield stack.enter_context(running_server(folder, **settings))


def stored_rows(server: RunningServer) -> dict[str, int]:
    async def count() -> dict[str, int]:
        store = await open_for_reading(server.database, timeout_seconds=30)
        try:
            async with store.read() as connection:
                tables = ("signatures", "profiles", "revisions", "active", "events")
                return {
                    table: (await connection.execute(text(f"SELECT count(*) FROM {table}"))).scalar_one()
                    for table in tables
                }
        finally:
            await store.close()

    return asyncio.run(count())


def changed(change: Callable[[dict[str, Any]], None], tree: dict[str, Any] | None = None) -> bytes:
    """The MessagePack body of a request whose tree was changed, under the signature of its own bytes."""
    found: dict[str, Any] = tree if tree is not None else unpack(REQUEST.encoded)  # type: ignore[assignment]  # a request is a map
    change(found)
    encoded = msgpack.packb(dict(sorted(found.items())))
    return pack({"profile": None, "request": encoded, "signature": digest_of(encoded)})


def put(*path: str | int, value: object) -> Callable[[dict[str, Any]], None]:
    def change(tree: dict[str, Any]) -> None:
        at: Any = tree
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return change


def raw_body(encoded: bytes) -> bytes:
    return pack({"profile": None, "request": encoded, "signature": digest_of(encoded)})


NESTED = b"\x91" * 100_000 + b"\xc0"
DUPLICATE_KEY = b"\x82" + msgpack.packb("schema") + b"\x01" + msgpack.packb("schema") + b"\x01"

BAD_BODIES: dict[str, tuple[bytes, int, str]] = {
    "unknown key": (changed(put("surprise", value=1)), 400, "request.surprise"),
    "unknown key below": (changed(put("options", "surprise", value=1)), 400, "request.options"),
    "missing key": (changed(lambda tree: tree.pop("phase")), 400, "request.phase"),
    "duplicate key": (raw_body(DUPLICATE_KEY), 400, "request.schema"),
    "float": (changed(put("num_segments", value=1.5)), 400, "request.num_segments"),
    "float in a column": (changed(put("candidates", "launch", 0, value=0.0)), 400, "request.candidates.launch[0]"),
    "negative": (changed(put("num_segments", value=-1)), 400, "request.num_segments"),
    "negative size": (changed(put("options", "bucket_cap_bytes", value=-5)), 400, "request.options.bucket_cap_bytes"),
    "2**63": (changed(put("num_segments", value=2**63)), 400, "request.num_segments"),
    "wrong type": (changed(put("candidates", "dtype", 2, value=7)), 400, "request.candidates.dtype[2]"),
    "schema": (changed(put("schema", value=99)), 422, "request.schema"),
    "trailing bytes": (raw_body(REQUEST.encoded + b"\x00"), 400, "request"),
    "truncated": (raw_body(REQUEST.encoded[:-9]), 400, "request"),
    "not canonical": (raw_body(b"\x81\xa6schema\xcd\x00\x01"), 400, "request"),
    "nesting bomb": (raw_body(NESTED), 400, "request"),
    "extension type": (raw_body(b"\xd4\x01\x00"), 400, "request"),
    "empty request": (raw_body(b""), 400, "request"),
    "body: trailing bytes": (plan_body(REQUEST) + b"\xc0", 400, "body"),
    "body: truncated": (plan_body(REQUEST)[:-1], 400, "body"),
    "body: nesting bomb": (NESTED, 400, "body"),
    "body: maps in maps": (pack({"a": {"b": {}}}), 400, "body"),
    "body: empty": (b"", 400, "body"),
    "body: not a map": (b"\x01", 400, "body"),
    "body: unknown key": (
        pack({"plan": b"", "profile": None, "request": REQUEST.encoded, "signature": REQUEST.signature}),
        400,
        "body.plan",
    ),
    "body: duplicate key": (
        b"\x84" + b"\xa7profile\xc0" * 2 + b"\xa7request\xc4\x00" + b"\xa9signature\xa0",
        400,
        "body.profile",
    ),
    "body: no signature": (pack({"profile": None, "request": REQUEST.encoded}), 400, "body.signature"),
    "body: signature in capitals": (
        pack({"profile": None, "request": REQUEST.encoded, "signature": REQUEST.signature.upper()}),
        400,
        "body.signature",
    ),
    "body: request is text": (
        pack({"profile": None, "request": "text", "signature": REQUEST.signature}),
        400,
        "body.request",
    ),
    "body: request is a float": (
        msgpack.packb({"profile": None, "request": 1.5, "signature": REQUEST.signature}),
        400,
        "body.request",
    ),
    "profile: wrong length": (
        pack(
            {
                "profile": pack({**PROFILE.to_wire(), "live_bytes": [0]}),
                "request": REQUEST.encoded,
                "signature": REQUEST.signature,
            }
        ),
        400,
        "profile.live_bytes",
    ),
    "profile: truncated": (
        pack({"profile": PROFILE.encoded[:-3], "request": REQUEST.encoded, "signature": REQUEST.signature}),
        400,
        "profile",
    ),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_bad_messagepack_body_names_its_field_and_stores_nothing(server, client, name):
    body, status, path = BAD_BODIES[name]
    before = stored_rows(server)
    answer = client.post("/v1/plans", content=body, headers=MSGPACK | {"Accept": "application/json"})
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["path"].startswith(path), problem
    assert stored_rows(server) == before
    assert client.get(f"/v1/plans/{REQUEST.signature}").status_code == 404


def json_body(**changes: object) -> bytes:
    tree: dict[str, Any] = {"profile": None, "request": REQUEST.to_wire(), "signature": REQUEST.signature}
    return json.dumps(tree | changes).encode()


BAD_JSON: dict[str, tuple[bytes, str]] = {
    "float": (json_body(request={**REQUEST.to_wire(), "num_segments": 1.0}), "body"),
    "nan": (b'{"profile": NaN}', "body"),
    "duplicate key": (b'{"profile": null, "profile": null}', "body.profile"),
    "unknown key": (json_body(surprise=1), "body.surprise"),
    "2**63": (json_body(request={**REQUEST.to_wire(), "num_segments": 2**63}), "body.request.num_segments"),
    "negative": (json_body(request={**REQUEST.to_wire(), "num_segments": -1}), "request.num_segments"),
    "trailing": (json_body() + b"x", "body"),
    "truncated": (json_body()[:-1], "body"),
    "nesting bomb": (b"[" * 100_000, "body"),
    "lone surrogate": (b'{"profile": "\\ud800"}', "body.profile"),
    "not utf-8": (b'{"profile": "\xff"}', "body"),
    "many digits": (b'{"profile": ' + b"9" * 5_000 + b"}", "body"),
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_a_bad_json_body_names_its_field_and_stores_nothing(server, client, name):
    body, path = BAD_JSON[name]
    before = stored_rows(server)
    answer = client.post("/v1/plans", content=body, headers=JSON)
    assert answer.status_code == 400, answer.text
    assert answer.json()["path"].startswith(path), answer.text
    assert stored_rows(server) == before


@pytest.mark.parametrize("encode", ["msgpack", "json"])
def test_a_signature_that_is_not_the_content_is_422_and_stores_nothing(server, client, encode):
    claimed = small_request(101).signature
    before = stored_rows(server)
    if encode == "msgpack":
        body, headers = pack({"profile": None, "request": REQUEST.encoded, "signature": claimed}), MSGPACK
    else:
        body, headers = to_json({"profile": None, "request": REQUEST.to_wire(), "signature": claimed}), JSON
    answer = client.post("/v1/plans", content=body, headers=headers | {"Accept": "application/json"})
    assert answer.status_code == 422
    problem = answer.json()
    assert problem["type"] == "urn:bucketplan:problem:signature-mismatch"
    assert (problem["claimed"], problem["actual"]) == (claimed, REQUEST.signature)
    assert stored_rows(server) == before


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/xml", "application/json; charset=latin-1"])
def test_a_wrong_content_type_is_415(server, client, content_type):
    before = stored_rows(server)
    headers = {} if content_type is None else {"Content-Type": content_type}
    answer = client.post("/v1/plans", content=plan_body(REQUEST), headers=headers)
    assert answer.status_code == 415
    assert answer.json()["path"] == "Content-Type"
    assert stored_rows(server) == before


def test_an_unknown_content_encoding_is_415_and_says_what_is_taken(client):
    answer = client.post("/v1/plans", content=b"x", headers=MSGPACK | {"Content-Encoding": "br"})
    assert answer.status_code == 415
    assert "gzip" in answer.headers["accept-encoding"]


@pytest.mark.parametrize(
    "body",
    [b"not gzip", gzip.compress(b"x" * 1000)[:-4], gzip.compress(b"x") + b"more", zlib.compress(b"x")],
    ids=["no gzip", "truncated", "followed", "zlib"],
)
def test_damaged_gzip_is_400(client, body):
    answer = client.post("/v1/plans", content=body, headers=MSGPACK | {"Content-Encoding": "gzip"})
    assert answer.status_code == 400
    assert unpack(answer.content)["path"] == "body"


@pytest.mark.parametrize("path", ["/v1/plans?parameter=a%00b", "/v1/plans?strategy=%00", "/plans?parameter=%00"])
def test_nul_in_the_address_is_400_on_every_store(client, path):
    answer = client.get(path)
    assert (answer.status_code, answer.json()["path"]) == (400, path.partition("?")[2].partition("=")[0])


def test_a_request_whose_names_hold_nul_is_400_and_stores_nothing(server, client):
    tree = REQUEST.to_wire()
    tree["candidates"]["param_name"][0] = "layers\0weight"
    request = type(REQUEST).from_wire(tree)
    before = stored_rows(server)
    answer = client.post("/v1/plans", content=plan_body(request), headers=MSGPACK)
    assert (answer.status_code, unpack(answer.content)["path"]) == (400, "request.candidates[0]"), answer.content
    assert stored_rows(server) == before


@pytest.mark.parametrize("what", ["revisions", "activate"])
def test_control_characters_in_a_reason_are_400_and_lines_are_not(client, what):
    client.post("/v1/plans", content=plan_body(REQUEST), headers=MSGPACK)
    content = {"options": {}} if what == "revisions" else {"revision": 1}
    for reason, status in (("a\0b", 400), ("\x1b[2J", 400), ("one\n\ttwo", 200)):
        answer = client.post(f"/v1/plans/{REQUEST.signature}/{what}", json={**content, "reason": reason})
        assert answer.status_code // 100 * 100 == status, answer.content
        assert status == 200 or answer.json()["path"] == "body.reason"


def test_the_cap_applies_after_inflation(client):
    bomb = gzip.compress(bytes(64 * 2**20))
    assert len(bomb) < 256 * 1024
    answer = client.post("/v1/plans", content=bomb, headers=MSGPACK | {"Content-Encoding": "gzip"})
    assert answer.status_code == 413
    assert unpack(answer.content)["limit_bytes"] == 256 * 1024
