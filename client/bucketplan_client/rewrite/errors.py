"""What a rewrite refuses."""

from __future__ import annotations

from bucketplan_client.errors import ClientError, Where

__all__ = ["RewriteError", "StalePlan"]


class StalePlan(ClientError):
    """The live graph is not the one that was described: `change` says what differs. Nothing was touched."""

    def __init__(self, change: str, *, signature: str | None = None) -> None:
        self.change = change
        super().__init__(
            f"the graph changed since it was described: {change}",
            remedy="Describe it again and ask for its plan",
            where=Where(signature=signature),
        )


class RewriteError(ClientError):
    """The rewrite failed and was taken back; `node` names where the graph would have become invalid."""

    def __init__(self, node: str, reason: str) -> None:
        self.node = node
        self.reason = reason
        super().__init__(
            f"rewrite undone at node {node!r}: {reason}",
            remedy="Apply the plan whole, without leaving out kinds that depend on each other",
        )
