"""What is kept in memory is what was used last."""

from bucketplan_core.epoch import Epoch
from bucketplan_server.memory import EpochMemory
from bucketplan_server.recent import Recent
from tests.support.documents import SIZE


def test_what_was_read_last_stays():
    kept = Recent[str, int](2)
    kept.put("a", 1)
    kept.put("b", 2)
    assert kept.get("a") == 1
    kept.put("c", 3)
    assert [kept.get(key) for key in "abc"] == [1, None, 3]


def test_values_weigh_what_they_weighed_when_they_were_put():
    kept = Recent[str, list[int]](5, weigh=len)
    value = [1, 2]
    kept.put("a", value)
    value.append(3)
    kept.put("b", [1, 2, 3])
    assert (kept.weight, len(kept)) == (5, 2)
    kept.put("b", [1])
    kept.drop("a")
    kept.drop("a")
    assert (kept.weight, len(kept)) == (1, 1)
    kept.put("large", [0] * 6)
    assert (kept.get("large"), kept.get("b")) == (None, [1])


def test_an_epoch_that_is_read_stays_in_memory():
    first, second, third = (
        Epoch.build(job=f"job-{number}", options=SIZE, topology={}, overrides={}) for number in range(3)
    )
    memory = EpochMemory(most=2)
    memory.put(first)
    memory.put(second)
    assert memory.get(first.id) is first
    memory.put(third)
    assert (memory.get(first.id), memory.get(second.id), memory.get(third.id)) == (first, None, third)
