"""A body that is too large is refused with the limit that it passed: the server's setting, or what the call takes."""

import gzip
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from bucketplan_core.wire import pack
from bucketplan_server.http.bodies import MAX_DOCUMENT_BYTES
from bucketplan_server.http.front import Front
from tests.support.documents import MSGPACK, plan_body, small_request
from tests.support.inprocess import InProcess, front_of, in_process

SMALL, LARGE = 32 * 2**10, 2 * 2**20
FORM_BYTES = 64 * 2**10
NOWHERE = "0" * 64
CALLS = {
    "plan": ("POST", "/v1/plans"),
    "revision": ("POST", f"/v1/plans/{NOWHERE}/revisions"),
    "activation": ("POST", f"/v1/plans/{NOWHERE}/activate"),
    "attempt": ("POST", "/v1/jobs/j/attempts"),
    "reports": ("POST", "/v1/jobs/j/attempts/1/reports"),
    "profile": ("PUT", "/v1/profiles/p"),
    "replan form": ("POST", f"/plans/{NOWHERE}/replan"),
    "activation form": ("POST", f"/plans/{NOWHERE}/activate"),
    "login form": ("POST", "/login"),
}
OWN = {name: FORM_BYTES if "form" in name else None if name == "plan" else MAX_DOCUMENT_BYTES for name in CALLS}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, tuple[InProcess, Front]]]:
    folder = tmp_path_factory.mktemp("limits")
    with (
        in_process([str(folder / "small.db")], max_body_bytes=SMALL) as small,
        in_process([str(folder / "large.db")], max_body_bytes=LARGE) as large,
    ):
        yield {SMALL: (small, front_of(small.states[0])), LARGE: (large, front_of(large.states[0]))}


async def streamed(content: bytes) -> AsyncIterator[bytes]:
    """Without a declared length."""
    for start in range(0, len(content), 2**16):
        yield content[start : start + 2**16]


@pytest.mark.parametrize("sent", ["declared", "streamed", "gzip"])
@pytest.mark.parametrize("set_bytes", [SMALL, LARGE])
@pytest.mark.parametrize("call", CALLS)
def test_the_text_names_the_limit_that_was_passed(servers, call, set_bytes, sent):
    server, front = servers[set_bytes]
    limit = min(OWN[call] or set_bytes, set_bytes)
    whose = "that BUCKETPLAN_MAX_BODY_BYTES sets" if limit == set_bytes else "that this call takes on any server"
    content = bytes(limit + 1)
    headers = {"Accept": "application/json", "Content-Type": "application/msgpack"}
    if "form" in call:
        headers["Content-Type"] = "application/x-www-form-urlencoded"
    if sent == "gzip":
        content = gzip.compress(content)
        headers["Content-Encoding"] = "gzip"

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://127.0.0.1") as client:
            method, path = CALLS[call]
            body = streamed(content) if sent == "streamed" else content
            return await client.request(method, path, content=body, headers=headers)

    answer = server.run(ask())
    assert answer.status_code == 413
    how = "gzip that inflates to more than" if sent == "gzip" else "larger than"
    assert f"{how} {limit} bytes, " in answer.text
    assert whose in answer.text
    assert ("BUCKETPLAN_MAX_BODY_BYTES" in answer.text) == (limit == set_bytes)


def test_a_body_of_exactly_the_limit_is_read(servers):
    server, _ = servers[SMALL]
    post = server.call("POST", "/v1/plans", content=bytes(SMALL), **MSGPACK)
    assert server.run(post).status_code == 400
    assert server.run(server.call("POST", "/v1/plans", content=plan_body(small_request()), **MSGPACK)).is_success
    assert server.run(server.call("PUT", "/v1/profiles/p", content=pack({}), **MSGPACK)).status_code == 400
