"""Bodies that are almost right: valid ones with a value, a key or a byte changed, to every call that takes one."""

import copy
import hashlib
import os
import random
from pathlib import Path

import msgpack
import pytest

from bucketplan_core.attempt import AttemptRequest, RankReport
from bucketplan_core.wire import pack, unpack
from tests.server.test_profiles import measured
from tests.support import counts
from tests.support.documents import MSGPACK, profile_of, small_request
from tests.support.inprocess import InProcess, in_process

GROWTH_BYTES = 96 * 2**20
"""What the server may hold more after the last body than after the first fifth: caches, and unreturned pages."""
ODD = (
    None, True, 0, -1, 1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 1.5, float("nan"), "", "a" * 300, "\x00", "\ud7ff",
    b"", b"\xc1", b"\xff" * 40, [], {}, [[]], [0] * 50, {"": ""}, {"a": {"b": {"c": []}}}, "0" * 64, "none/1",
)  # fmt: skip


def mutated(tree: object, dice: random.Random) -> object:
    """A copy with one to three places changed."""
    changed = copy.deepcopy(tree)
    for _ in range(dice.randint(1, 3)):
        node, parent, key = changed, None, None
        while isinstance(node, dict | list) and node and dice.random() < 0.85:
            parent, key = node, dice.choice(list(node) if isinstance(node, dict) else range(len(node)))
            node = parent[key]
        if parent is None:
            return odd(dice)
        kind = dice.randrange(5)
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[dice.choice(["extra", "", key * 2])] = node
        elif kind == 2 and isinstance(node, int) and not isinstance(node, bool):
            parent[key] = min(max(node + dice.choice([-1, 1, 2**32, -(2**40)]), -(2**63)), 2**64 - 1)
        elif kind == 3 and isinstance(parent, list):
            parent.extend([node] * dice.randint(1, 5))
        else:
            parent[key] = odd(dice)
    return changed


def odd(dice: random.Random) -> object:
    """A value of its own: the next change may go into a list or map of it, and no seed may depend on those before."""
    return copy.deepcopy(dice.choice(ODD))


def damaged(data: bytes, dice: random.Random) -> bytes:
    """A few bytes changed, cut or repeated."""
    body = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(body) + 1)
        match dice.randrange(4):
            case 0:
                del body[at : at + dice.randint(1, 20)]
            case 1:
                body[at:at] = dice.randbytes(dice.randint(1, 8))
            case 2:
                body[at:at] = body[at : at + 30]
            case _ if at < len(body):
                body[at] = dice.randrange(256)
    return bytes(body)


def bodies(signature: str) -> dict[str, tuple[str, object]]:
    """Valid bodies by call."""
    opening = AttemptRequest(key="k", participants={"fsdp": ((0, 1), (2, 3))}, topology={"fsdp": 1})
    ranks = RankReport(rank=0, slot="joint", signature=signature, digests={"fsdp": "0" * 64}, members={"fsdp": (0, 1)})
    return {
        "/v1/jobs/fuzz/attempts": ("POST", opening.to_wire()),
        "/v1/jobs/fuzz/attempts/1/reports": ("POST", {"reports": [ranks.to_wire()]}),
        f"/v1/plans/{signature}/revisions": ("POST", {"options": {"prefetch": 2}, "parent": 1, "reason": "r"}),
        f"/v1/plans/{signature}/activate": ("POST", {"expected": 1, "job": "fuzz", "reason": "r", "revision": 1}),
        "/v1/profiles/fuzz": ("PUT", {"profile": measured("fuzz"), "reason": "r"}),
    }


def almost_a_plan(dice: random.Random) -> bytes:
    request = small_request(dice.randrange(50))
    tree = request.to_wire()
    profile = unpack(profile_of(request).encoded)
    if dice.random() < 0.7:
        tree = mutated(tree, dice)
    else:
        profile = mutated(profile, dice)
    encoded = encode(tree, dice)
    # Where the name fits, the body gets as far as the planner.
    signature = hashlib.sha256(encoded).hexdigest() if dice.random() < 0.8 else request.signature
    body = {"profile": encode(profile, dice), "request": encoded, "signature": signature}
    return encode(mutated(body, dice) if dice.random() < 0.1 else body, dice)


def encode(tree: object, dice: random.Random) -> bytes:
    try:
        data = pack(tree)
    except Exception:
        # What the canonical encoding does not hold, such as floats.
        data = msgpack.packb(tree, use_bin_type=True)
    return damaged(data, dice) if dice.random() < 0.1 else data


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    with in_process([str(tmp_path_factory.mktemp("fuzz") / "fuzz.db")], memory_cache_bytes=2**22) as opened:
        yield opened


@pytest.mark.soak
def test_no_body_breaks_the_server_or_fills_its_memory(servers: InProcess):
    request = small_request(99)
    body = pack({"profile": None, "request": request.encoded, "signature": request.signature})
    assert servers.run(servers.call("POST", "/v1/plans", content=body, **MSGPACK)).status_code == 201
    valid = bodies(request.signature)
    total = counts.count(test=5_000, soak=100_000)
    statuses: dict[int, int] = {}
    early = 0

    async def one(seed: int) -> None:
        dice = random.Random(seed)
        if dice.random() < 0.4:
            method, path, content = "POST", "/v1/plans", almost_a_plan(dice)
        else:
            path = dice.choice(sorted(valid))
            method, tree = valid[path]
            content = encode(mutated(tree, dice), dice)
        answer = await servers.call(method, path, content=content, **MSGPACK)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        assert answer.status_code < 500, (path, answer.content[:500])
        unpack(answer.content)

    for seed in counts.seeds("fuzzed bodies", test=5_000, soak=100_000):
        servers.run(one(seed))
        if seed == counts.seed_start() + total // 5:
            early = resident_bytes()
    assert resident_bytes() - early < GROWTH_BYTES
    # Bodies that all die at the first field would test nothing behind it.
    assert {200, 201, 400, 409, 422} <= set(statuses), statuses
