"""What becomes of a failure inside a pass: it is told where it happened, and ends this rank or is raised.

A pass runs deep inside a compiler, which knows neither the job nor the server; the plans that it was given know both.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import Literal, NoReturn, TypeVar

import torch.distributed as dist

from bucketplan_client.errors import ClientError, PassFailed, Where
from bucketplan_client.membership import is_distributed, this_rank

__all__ = ["ABORT_STATUS", "OnError", "end_or_raise", "end_process", "step", "where_of"]

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

ABORT_STATUS = 70
"""Exit status of a process that ends itself (EX_SOFTWARE of sysexits.h): a launcher starts or stops the whole job."""

OnError = Literal["abort", "raise"]


def where_of(plans: object) -> Where:
    """This rank, and the job and server of `plans` as far as that knows them (`PlanClient`, those of an attempt)."""
    known = getattr(plans, "where", None)
    if not isinstance(known, Where):
        return Where(rank=this_rank())
    return known if known.rank is not None else known.at(rank=this_rank())


def step(name: str, action: Callable[[], T]) -> T:
    """What `action` returns; what it raises becomes `PassFailed` of this step."""
    try:
        return action()
    except PassFailed:
        raise
    except Exception as error:
        where = error.where if isinstance(error, ClientError) else Where()
        raise PassFailed(name, error, where=where) from error


def end_or_raise(error: Exception, on_error: OnError, where: Where) -> NoReturn:
    """Raise `error`, told `where` it happened; under ``abort``, in a world of several ranks, end this process."""
    if isinstance(error, ClientError):
        error.located(where)
    if on_error == "raise" or not is_distributed() or dist.get_world_size() == 1:
        raise error
    print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)  # noqa: T201  (seen without logging)
    _LOG.critical("rank %d ends: %s", this_rank(), error)
    sys.stdout.flush()
    end_process()


def end_process() -> NoReturn:
    """End this process at once: threads in a collective of another library cannot be unwound."""
    logging.shutdown()
    os._exit(ABORT_STATUS)
