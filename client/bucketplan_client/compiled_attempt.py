"""An opened attempt under torch.compile: plans from its epoch, one fingerprint on all ranks, evidence of each graph.

with open_attempt(PlanClient(), groups=groups) as attempt, install_attempt(attempt):
    train(torch.compile(model))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bucketplan_client.errors import ClientError
from bucketplan_client.opening import Attempt
from bucketplan_client.passes import LOCAL_PLANS, UNBUCKETED
from bucketplan_client.torch_compile import Installation, RewrittenGraph, install
from bucketplan_core.attempt import RankReport
from bucketplan_core.groups import group_digests
from bucketplan_core.wire import pack

__all__ = ["install_attempt"]

_FINGERPRINT = "compiler pass"


def install_attempt(
    attempt: Attempt,
    *,
    deadline_s: float = 120.0,
    compare_first_execution: bool = False,
    first_execution_s: float = 300.0,
    **arguments: Any,
) -> Installation:
    """`torch_compile.install` as `attempt` decided; call it on every participant, before anything is compiled.

    Ranks compare the pass's fingerprint first, so that scopes, exclusions or resharding that differ between them are
    an `AgreementError` on all of them inside `deadline_s` and not a hang; a rank on which the pass cannot be installed
    tells the others why, who raise `RankFailed` at once. Each graph with collectives that is compiled
    leaves evidence in the job's store (a mismatch ends the job, naming both sides) and a report at the server. A rank
    for which a compile cache has replayed a graph compares nothing any more, since it cannot tell which graph that was;
    `compare_first_execution` can. `arguments` are those of `install`, without `plans`, `options`, `epoch`, `mode`,
    `compare` and `on_graph`.

    With `compare_first_execution` every rewritten graph is also compared within its groups right before it first runs,
    whether it was compiled or came from a compile cache. The ranks of a group wait for each other there, at most
    `first_execution_s`, and a difference is a `RanksDisagree` on all of them before a collective is issued.
    """

    def noted(done: RewrittenGraph) -> None:
        digests: dict[str, str] = {}
        slot, members = done.phase, attempt.groups
        if done.plan is not None and not done.replayed:
            digests = group_digests(done.request, done.plan.decision)
            attempt.evidence.note(done.phase, done.request, done.plan, attempt.groups)
            known = (done.phase, pack(dict(digests)).hex())
            if known in attempt.reported:
                return  # compiled again under other guards: others, whose guards hold, have no second one
            attempt.reported.add(known)
        else:
            # What has no counterpart on other ranks, or where nobody knows which, is no part of what is compared.
            slot, members = f"{done.phase}, not compared", {}
        attempt.report(
            RankReport(
                rank=attempt.rank,
                slot=slot,
                ordinal=attempt.ordinals[slot],
                uuid=attempt.uuid,
                signature=done.signature,
                decision=None if done.plan is None else done.plan.digest,
                digests=digests,
                members=members,
                statistics={
                    f"{key}.{name}": value for key, counts in done.statistics.items() for name, value in counts.items()
                },
                skipped=[f"{skipped.node}: {skipped.rule}" for skipped in done.skipped],
            )
        )
        attempt.ordinals[slot] += 1

    def compared(digests: Mapping[str, str]) -> None:
        # Ranks run their graphs in one order, while compile ids in a cached graph are those of the run that made it.
        attempt.compare_first_execution(f"{next(attempt.executions)}", digests, deadline_s=first_execution_s)

    try:
        installed = install(
            attempt.plans if attempt.plans is not None else LOCAL_PLANS,
            options=attempt.options if attempt.options is not None else UNBUCKETED,
            epoch=attempt.uuid,
            mode="bucketed" if attempt.bucketed else "unbucketed",
            on_graph=noted,
            compare=compared if compare_first_execution else None,
            where=attempt.where,
            **arguments,
        )
    except BaseException as error:
        # The others would wait for this rank in the comparison below until their deadline.
        attempt.withdraw(_FINGERPRINT, error)
        if isinstance(error, ClientError):
            error.located(attempt.where)
        raise
    try:
        attempt.compare(_FINGERPRINT, installed.bucketing.fingerprint, deadline_s=deadline_s)
        # From now on and not from the first hook on: a rank whose compile cache is warm has none, and must hear of a
        # mismatch between others all the same.
        attempt.evidence.watch()
    except BaseException:
        installed.uninstall()
        raise
    return installed
