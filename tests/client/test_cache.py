"""The plan cache on disk: right under its epoch, whole or not at all, bounded, whoever else uses it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bucketplan_client.cache import PlanCache, default_cache, default_cache_folder
from bucketplan_core import make_plan
from bucketplan_core.plan import Plan
from tests.client.requests import small_epoch, small_request
from tests.support.counts import count

OTHER_CAP = 500


@pytest.fixture
def cache(tmp_path: Path) -> PlanCache:
    return PlanCache(tmp_path / "cache")


def planned() -> Plan:
    return make_plan(small_request())


def overriding_plan() -> Plan:
    """Another legal decision for the signature of `planned`: the same graph, every candidate alone."""
    from dataclasses import replace

    from bucketplan_core.schedule import decide, place_original

    request = small_request()
    alone = [(member,) for lane in request.lanes for member in lane.members]
    plan = Plan(decision=decide(request, "size/1", place_original(request, alone)))
    assert plan.decision.signature == request.signature
    return replace(plan)


class TestLookup:
    def test_unknown_signature_is_none(self, cache):
        assert cache.plan("0" * 64, small_epoch()) is None
        assert cache.statistics.num_misses == 1

    def test_kept_plan_comes_back_byte_for_byte(self, cache):
        plan = planned()
        cache.keep(plan, small_epoch())
        found = PlanCache(cache.folder).plan(plan.decision.signature, small_epoch())
        assert found is not None
        assert found.encoded == plan.encoded

    def test_planners_own_plan_serves_another_epoch_without_an_override(self, cache):
        plan = planned()
        cache.keep(plan, small_epoch())
        assert cache.plan(plan.decision.signature, small_epoch(cap_bytes=OTHER_CAP)) is not None

    def test_overridden_plan_never_leaves_its_epoch(self, cache):
        """A rolled-back activation must not come back from a host's disk (and only from the hosts that have it)."""
        plan, signature = overriding_plan(), small_request().signature
        overridden = small_epoch(overrides={signature: plan.digest})
        cache.keep(plan, overridden)
        assert cache.plan(signature, small_epoch()) is None
        assert cache.plan(signature, overridden).digest == plan.digest

    def test_planners_own_plan_is_not_used_where_the_epoch_overrides_it(self, cache):
        signature = small_request().signature
        cache.keep(planned(), small_epoch())
        assert cache.plan(signature, small_epoch(overrides={signature: overriding_plan().digest})) is None

    def test_epochs_of_a_job_come_latest_first(self, cache):
        epochs = [small_epoch(cap_bytes=cap) for cap in (1000, 2000, 3000)]
        for number, epoch in enumerate(epochs):
            cache.keep_epoch(epoch)
            stamp = time.time() - 100 + number
            os.utime(next(cache.folder.glob(f"epochs/*/{epoch.id}.epoch")), (stamp, stamp))
        cache.keep_epoch(small_epoch(job="other"))
        assert cache.epochs("llama") == [epoch.id for epoch in reversed(epochs)]
        assert cache.epoch("llama", epochs[0].id) == epochs[0]

    def test_folder_can_be_named(self, monkeypatch, tmp_path):
        monkeypatch.setenv("BUCKETPLAN_CACHE", str(tmp_path / "here"))
        assert default_cache_folder() == tmp_path / "here"

    def test_user_without_a_home_has_no_cache_and_loses_nothing_else(self, monkeypatch):
        for name in ("BUCKETPLAN_CACHE", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)

        def no_home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", no_home)
        cache, plan = PlanCache(), planned()
        cache.keep(plan, small_epoch())
        cache.keep_epoch(small_epoch())
        assert cache.plan(plan.decision.signature, small_epoch()) is None
        assert cache.epochs(small_epoch().job) == []
        assert "set-BUCKETPLAN_CACHE" in str(cache.folder)
        assert default_cache() is None

    def test_default_is_the_folder_that_is_named(self, monkeypatch, tmp_path):
        monkeypatch.setenv("BUCKETPLAN_CACHE", str(tmp_path / "here"))
        assert default_cache().folder == tmp_path / "here"
        for name in (os.devnull, f"{os.devnull}/below"):
            monkeypatch.setenv("BUCKETPLAN_CACHE", name)
            assert default_cache() is None


class TestDamage:
    @settings(max_examples=count(test=100, soak=5_000), suppress_health_check=[HealthCheck.function_scoped_fixture])
    @pytest.mark.soak
    @given(data=st.data())
    def test_changed_file_is_discarded_and_reported_never_returned_as_another_plan(self, cache, data):
        plan, epoch = planned(), small_epoch()
        cache.keep(plan, epoch)
        files = sorted(path for path in cache.folder.rglob("*") if path.is_file() and path.name != "lock")
        victim = data.draw(st.sampled_from(files))
        content = victim.read_bytes()
        damaged = data.draw(
            st.one_of(
                st.binary(max_size=80),
                st.integers(0, len(content) - 1).map(lambda n: content[:n]),
                st.tuples(st.integers(0, len(content) - 1), st.integers(1, 255)).map(
                    lambda at: content[: at[0]] + bytes([content[at[0]] ^ at[1]]) + content[at[0] + 1 :]
                ),
            )
        )
        victim.write_bytes(damaged)
        found = cache.plan(plan.decision.signature, epoch)
        assert found is None or found.digest == plan.digest
        cache.keep(plan, epoch)
        assert cache.plan(plan.decision.signature, epoch).encoded == plan.encoded

    def test_damaged_file_is_named_in_the_log_and_gone(self, cache, caplog):
        cache.keep(planned(), small_epoch())
        (blob,) = cache.folder.glob("blobs/*/*.plan")
        blob.write_bytes(b"\xc1")
        with caplog.at_level(logging.WARNING):
            assert cache.plan(small_request().signature, small_epoch()) is None
        assert str(blob) in caplog.text
        assert not blob.exists()
        assert cache.statistics.num_damaged == 1

    def test_damaged_epoch_is_discarded(self, cache):
        cache.keep_epoch(small_epoch())
        (path,) = cache.folder.glob("epochs/*/*.epoch")
        path.write_bytes(small_epoch(cap_bytes=OTHER_CAP).encoded)
        assert cache.epoch("llama", small_epoch().id) is None
        assert not path.exists()

    @pytest.mark.parametrize("pattern", ["blobs/*/*.plan", "index/*/*", "epochs/*/*.epoch"])
    @pytest.mark.parametrize("kind", ["empty folder", "folder", "pipe", "large file"])
    def test_other_things_in_place_of_a_file_are_seen_and_replaced(self, cache, pattern, kind):
        plan, epoch = planned(), small_epoch()
        cache.keep(plan, epoch)
        cache.keep_epoch(epoch)
        for path in cache.folder.glob(pattern):
            path.unlink()
            if kind == "pipe":
                os.mkfifo(path)
            elif kind == "large file":
                path.touch()
                os.truncate(path, 2**40)
            else:
                path.mkdir()
                if kind == "folder":
                    (path / "file").write_text("not ours")
        if kind in ("pipe", "large file"):
            assert None in (cache.plan(plan.decision.signature, epoch), cache.epoch("llama", epoch.id))
            assert cache.statistics.num_damaged >= 1
        # A folder is left where it is, so that keeping alone has to replace it.
        cache.keep(plan, epoch)
        cache.keep_epoch(epoch)
        assert cache.plan(plan.decision.signature, epoch).encoded == plan.encoded
        assert cache.epoch("llama", epoch.id) == epoch

    def test_folder_in_place_of_a_file_is_discarded_by_reading(self, cache):
        cache.keep(planned(), small_epoch())
        (blob,) = cache.folder.glob("blobs/*/*.plan")
        blob.unlink()
        blob.mkdir()
        assert cache.plan(small_request().signature, small_epoch()) is None
        assert not blob.exists()

    def test_pipe_in_place_of_the_lock_holds_nobody(self, cache):
        cache.keep(planned(), small_epoch())
        (cache.folder / "lock").unlink(missing_ok=True)
        os.mkfifo(cache.folder / "lock")
        cache.trim()
        assert cache.plan(small_request().signature, small_epoch()) is not None

    def test_folder_that_cannot_be_written_costs_nothing_but_a_warning(self, tmp_path, caplog):
        (tmp_path / "file").write_text("no folder")
        cache = PlanCache(tmp_path / "file" / "cache")
        cache.keep(planned(), small_epoch())
        cache.keep_epoch(small_epoch())
        cache.trim()
        assert cache.plan(small_request().signature, small_epoch()) is None
        assert "cannot write" in caplog.text


class TestBound:
    def test_trim_keeps_what_was_used_last(self, tmp_path):
        plans = [make_plan(small_request(num_params=number)) for number in range(2, 12)]
        cache = PlanCache(tmp_path)
        for number, plan in enumerate(plans):
            cache.keep(plan, small_epoch())
            for path in cache.folder.rglob(f"{plan.digest}.plan"):
                os.utime(path, (1_000 + number, 1_000 + number))
        used = plans[0]
        assert cache.plan(used.decision.signature, small_epoch()) is not None
        small = PlanCache(tmp_path, max_bytes=cache.size_bytes() // 2)
        small.trim()
        assert small.size_bytes() <= small.max_bytes
        assert small.plan(used.decision.signature, small_epoch()) is not None
        assert small.plan(plans[1].decision.signature, small_epoch()) is None

    def test_starts_that_write_little_do_not_outgrow_it_together(self, tmp_path):
        for rows in range(8, 408, 2):
            cache = PlanCache(tmp_path, max_bytes=100_000)  # as a new process has it
            cache.keep(make_plan(small_request(rows=rows)), small_epoch())
            assert cache.size_bytes() <= cache.max_bytes

    def test_what_leads_to_a_plan_stays_with_it(self, cache):
        """Read every day, written weeks ago: the plan, its index under this and under other epochs, its epoch."""
        plans = [make_plan(small_request(rows=rows)) for rows in range(8, 48, 2)]
        for plan in plans:
            cache.keep(plan, small_epoch())
        cache.keep_epoch(small_epoch())
        for path in cache.folder.rglob("*"):
            if path.is_file():
                os.utime(path, (1_000, 1_000))
        used = plans[7].decision.signature
        assert cache.plan(used, small_epoch()) is not None
        small = PlanCache(cache.folder, max_bytes=cache.size_bytes() // 3)
        small.trim()
        assert small.size_bytes() <= small.max_bytes
        assert small.epochs("llama") == [small_epoch().id]
        assert small.epoch("llama", small_epoch().id) is not None
        assert small.plan(used, small_epoch()) is not None
        assert small.plan(used, small_epoch(cap_bytes=OTHER_CAP)) is not None

    def test_what_stands_there_already_is_not_written_again(self, cache):
        cache.keep(planned(), small_epoch())
        inodes = {path: path.stat().st_ino for path in cache.folder.rglob("*") if path.is_file()}
        PlanCache(cache.folder).keep(planned(), small_epoch())
        assert {path: path.stat().st_ino for path in inodes} == inodes

    def test_old_epochs_of_a_job_are_dropped(self, cache):
        for cap in range(1000, 1020):
            cache.keep_epoch(small_epoch(cap_bytes=cap))
        assert len(cache.epochs("llama")) == 8


class TestManyProcesses:
    def test_readers_see_whole_plans_while_writers_write_trim_and_are_killed(self, tmp_path):
        folder = tmp_path / "cache"
        reader = PlanCache(folder)
        epoch = small_epoch()
        requests = [small_request(num_params=number) for number in range(2, 9)]
        wanted = {request.signature: make_plan(request).encoded for request in requests}
        num_found = 0
        for round_number in range(4):
            writers = [
                subprocess.Popen(
                    [sys.executable, "-m", "tests.client.cache_writer", str(folder), str(round_number * 3 + index)],
                    stdout=subprocess.PIPE,
                )
                for index in range(2)
            ]
            for writer in writers:
                assert writer.stdout is not None
                assert writer.stdout.readline() == b"ready\n"
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                for signature, encoded in wanted.items():
                    found = reader.plan(signature, epoch)
                    if found is not None:
                        num_found += 1
                        assert found.encoded == encoded
            for writer in writers:
                writer.send_signal(signal.SIGKILL)
                writer.wait()
                assert writer.stdout is not None
                writer.stdout.close()
        assert num_found > 0
        assert reader.statistics.num_damaged == 0
