"""An opened epoch with the bytes of its overrides: as the server answers it, and as a plan cache holds it."""

from __future__ import annotations

from bucketplan_client.cache import PlanCache
from bucketplan_client.opening_documents import Opened
from bucketplan_core.epoch import Epoch
from bucketplan_core.errors import DecodeError
from bucketplan_core.fields import Fields
from bucketplan_core.plan import Plan
from bucketplan_core.wire import WireValue

__all__ = ["load_epoch", "read_opened", "remember", "verify_overrides"]

_MAX_OVERRIDES = 10_000


def read_opened(tree: WireValue) -> Opened:
    """The server's answer to an opening; raises `DecodeError` where a part is not what its digest says.

    Keys that a later release may have added beside the epoch are left alone: what counts is hashed or verified.
    """
    fields = Fields(tree, "opened")
    epoch = Epoch.from_wire(fields.raw("epoch"), "opened.epoch")
    epoch_id = fields.digest("epoch_id")
    if epoch_id != epoch.id:
        raise DecodeError("opened.epoch_id", epoch_id, f"the epoch hashes to {epoch.id}")
    overrides: dict[str, bytes] = {}
    for index, value in enumerate(fields.array("overrides", limit=_MAX_OVERRIDES)):
        entry = Fields(value, f"opened.overrides[{index}]")
        signature, plan = entry.digest("signature"), entry.raw("plan")
        if not isinstance(plan, bytes):
            raise DecodeError(f"opened.overrides[{index}].plan", plan, "must be bytes")
        overrides[signature] = plan
    opened = Opened(epoch=epoch, overrides=overrides, attempt=fields.integer("attempt", low=1))
    verify_overrides(opened)
    return opened


def verify_overrides(opened: Opened) -> None:
    """Raise `DecodeError` unless every override of the epoch is there with the plan that the epoch promises."""
    for override in opened.epoch.overrides:
        encoded = opened.overrides.get(override.signature)
        if encoded is None:
            raise DecodeError("opened.overrides", override.signature, "the epoch overrides it, but its plan is missing")
        plan = Plan.decode(encoded, expected_signature=override.signature)
        if plan.digest != override.digest:
            raise DecodeError("opened.overrides", plan.digest, f"the epoch promises plan {override.digest}")


def load_epoch(cache: PlanCache | None, job: str, epoch_id: str) -> Opened | None:
    """An epoch from the cache, only with every plan that it overrides: nobody could give those otherwise."""
    epoch = cache.epoch(job, epoch_id) if cache is not None else None
    if cache is None or epoch is None:
        return None
    overrides: dict[str, bytes] = {}
    for override in epoch.overrides:
        plan = cache.plan(override.signature, epoch)
        if plan is None:
            return None
        overrides[override.signature] = plan.encoded
    return Opened(epoch=epoch, overrides=overrides)


def remember(cache: PlanCache, opened: Opened) -> None:
    """Keep what `load_epoch` needs, which an attempt committed to."""
    for override in opened.epoch.overrides:
        plan = Plan.decode(opened.overrides[override.signature], expected_signature=override.signature)
        cache.keep(plan, opened.epoch)
    cache.keep_epoch(opened.epoch)
