"""What `open_attempt` is made of: a part of another kind is refused with its name, and the other ranks are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from bucketplan_client.arguments import BadArgument
from bucketplan_client.errors import OpeningAborted, Where
from bucketplan_client.opening import open_attempt
from tests.client.test_opening import RANKS, open_all


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("client", "http://plans:8321"),
        ("defaults", {"strategy": "size"}),
        ("on_mismatch", None),
        ("store", None),
        ("store", "tcp://localhost"),
    ],
)
def test_it_is_refused_by_name(option: str, value: Any) -> None:
    given: dict[str, Any] = {
        "client": None,
        "groups": {"fsdp": (0,)},
        "job": "llama",
        "rank": 0,
        "store": dist.HashStore(),
        "deadline_s": 5.0,
        option: value,
    }
    with pytest.raises(BadArgument) as caught:
        open_attempt(given.pop("client"), **given)
    assert caught.value.option == option
    assert caught.value.where == Where(rank=0, job="llama")


def test_the_missing_process_group_is_what_a_user_is_told_of() -> None:
    with pytest.raises(BadArgument, match="init_process_group") as caught:
        open_attempt(None, groups={"fsdp": (0,)}, job="llama", rank=0)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("wrong", [{"defaults": {"strategy": "size"}}, {"on_mismatch": "abort"}], ids=str)
def test_the_others_are_told_at_once(wrong: dict[str, Any]) -> None:
    outcomes = open_all(None, vary=lambda rank: wrong if rank == 2 else {})
    assert isinstance(outcomes[2], BadArgument)
    for rank in set(RANKS) - {2}:
        assert isinstance(outcomes[rank], OpeningAborted)
        assert outcomes[rank].odd == (2,)
        assert next(iter(wrong)) in outcomes[rank].message
