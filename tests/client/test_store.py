"""The job's store on every kind of store that torch has."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from bucketplan_client.agreement import GroupView
from bucketplan_client.errors import StoreFailed, Where
from bucketplan_client.evidence import Evidence
from bucketplan_client.opening import open_attempt
from bucketplan_client.store import JobStore


def tcp_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(params=["hash", "file", "tcp"])
def base(request, tmp_path):
    if request.param == "hash":
        return dist.HashStore()
    return dist.FileStore(str(tmp_path / "store"), -1) if request.param == "file" else tcp_store()


class TestValues:
    @pytest.mark.parametrize("value", [b"", b"\xff\x00\x01", b"text", b"#1:looks like a chunk"])
    def test_comes_back_as_it_was(self, base, value):
        store = JobStore(base, prefix="p")
        store.put("key", value)
        assert store.get("key") == value
        assert store.get_many(["key"]) == [value]

    def test_above_what_a_store_takes_at_once_comes_back(self, base):
        store = JobStore(base, prefix="p")
        value = bytes(range(256)) * (10 * 2**12) + b"end"
        assert store.put_once("key", value) == value
        assert store.put_once("key", b"other") == value
        assert store.get("key") == value

    def test_that_is_not_there_is_none_at_once(self, base):
        assert JobStore(base, prefix="p").get("key") is None

    def test_first_writer_wins(self, base):
        store = JobStore(base, prefix="p")
        assert store.put_once("key", b"first") == b"first"
        assert store.put_once("key", b"second") == b"first"

    def test_parts_are_apart(self, base):
        store = JobStore(base, prefix="p")
        store.scoped("a").put("key", b"a")
        assert store.scoped("b").get("key") is None
        assert store.separate().scoped("a").get("key") == b"a"


class TestWait:
    def test_returns_nothing_missing_when_all_are_there(self, base):
        store = JobStore(base, prefix="p")
        store.put("a", b"1")
        store.put("b", b"2")
        assert store.wait(["a", "b"], time.monotonic() + 10) == ()

    def test_names_what_is_missing_at_the_deadline(self, base):
        store = JobStore(base, prefix="p")
        store.put("a", b"1")
        assert store.wait(["a", "b", "c"], time.monotonic() + 0.1) == ("b", "c")

    def test_past_deadline_still_looks_once(self, base):
        store = JobStore(base, prefix="p")
        store.put("a", b"1")
        assert store.wait(["a"], time.monotonic() - 1) == ()


_HOST = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_killed_store_is_a_typed_error_not_a_hang():
    with subprocess.Popen([sys.executable, "-c", _HOST], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        port = int(host.stdout.readline())
        base = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        store = JobStore(base, prefix="p", where=Where(rank=4, job="llama"))
        store.put("a", b"1")
        host.kill()
    with pytest.raises(StoreFailed) as caught:
        store.wait(["b"], time.monotonic() + 30)
    assert caught.value.where.rank == 4
    with pytest.raises(StoreFailed):
        store.put("a", b"2")


class TestStoppedHost:
    """The process that hosts the store stands still: connections stay open, nothing is answered."""

    @pytest.fixture
    def base(self):
        with subprocess.Popen([sys.executable, "-c", _HOST], stdout=subprocess.PIPE, text=True) as host:
            assert host.stdout is not None
            base = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), is_master=False, wait_for_workers=False)
            base.set("there", "1")
            host.send_signal(signal.SIGSTOP)
            yield base
            host.kill()

    @pytest.mark.parametrize(
        "call",
        [
            # A plain put is not answered by any store: it is sent, or fails at once.
            lambda store: store.put_once("a", b"1"),
            lambda store: store.get("there"),
            lambda store: store.get_many(["there"]),
            lambda store: store.wait(["there"], time.monotonic() - 1.0),
            lambda store: store.wait(["missing"], time.monotonic() + 0.5),
            lambda store: store.separate().get("there"),
        ],
    )
    def test_is_a_typed_error_not_a_hang(self, base, call):
        store = JobStore(base, prefix="p", where=Where(rank=4, job="llama"), call_s=0.5)
        with pytest.raises(StoreFailed, match="did not answer") as caught:
            call(store)
        assert caught.value.where.rank == 4

    def test_ends_an_opening(self, base):
        with pytest.raises(StoreFailed, match="did not answer"):
            open_attempt(
                None,
                groups={"fsdp": (0, 1)},
                job="stopped",
                store=base,
                rank=1,
                deadline_s=0.5,
                server_s=0.1,
                grace_s=0.1,
            )

    def test_does_not_hold_up_the_end_of_an_attempt(self, monkeypatch):
        monkeypatch.setattr("bucketplan_client.evidence._END_S", 0.1)
        with subprocess.Popen([sys.executable, "-c", _HOST], stdout=subprocess.PIPE, text=True) as host:
            assert host.stdout is not None
            base = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), is_master=False, wait_for_workers=False)
            evidence = Evidence(JobStore(base, prefix="p"), rank=0, where=Where(rank=0), poll_s=0.0)
            evidence.watch()
            watcher = evidence._thread
            host.send_signal(signal.SIGSTOP)
            evidence.close()
            assert watcher is not None
            assert evidence._thread is None
            host.kill()
        watcher.join()


@pytest.mark.parametrize("use_libuv", [True, False])
def test_value_that_is_written_once_wakes_those_who_wait(use_libuv):
    """A TCPStore without libuv (``USE_LIBUV=0``) wakes nobody when compare_set has written."""
    base = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
    other = dist.TCPStore("127.0.0.1", base.port, is_master=False, wait_for_workers=False, use_libuv=use_libuv)
    until = time.monotonic() + 30.0
    missing: list[tuple[str, ...]] = []

    def answer() -> None:
        store = JobStore(other, prefix="p")
        for turn in range(50):
            missing.append(store.wait([f"question/{turn}"], until))
            store.put_once(f"answer/{turn}", b"yes")

    thread = threading.Thread(target=answer)
    thread.start()
    store = JobStore(base, prefix="p")
    # In turns, so that each waits before the other writes.
    for turn in range(50):
        store.put_once(f"question/{turn}", b"well?")
        missing.append(store.wait([f"answer/{turn}"], until))
    thread.join()
    assert missing == [()] * 100
    assert time.monotonic() < until


_WAITING = """
import signal, sys
import torch.distributed as dist
from bucketplan_client.agreement import GroupView, Lockstep, Report
from bucketplan_client.store import JobStore

store = JobStore(dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False), prefix="job")
# Whatever a shell starts behind its back inherits that Ctrl-C is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
print("waiting", flush=True)
Lockstep(store, deadline_s=600.0, name="pass").agree(Report(rank=0, groups=(GroupView(role="fsdp", members=(0, 1)),)))
"""


def test_rank_that_waits_for_others_obeys_an_interrupt():
    base = tcp_store()
    with subprocess.Popen(
        [sys.executable, "-c", _WAITING, str(base.port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as waiting:
        try:
            assert waiting.stdout is not None
            assert waiting.stdout.readline() == "waiting\n"
            JobStore(base, prefix="job").wait(_first_payload(), time.monotonic() + 60.0)
            waiting.send_signal(signal.SIGINT)
            _, said = waiting.communicate(timeout=120.0)
        finally:
            waiting.kill()
    assert "KeyboardInterrupt" in said


def _first_payload() -> list[str]:
    view = GroupView(role="fsdp", members=(0, 1))
    return [f"lockstep/pass/0/up/{view.key}/rank/0"]
