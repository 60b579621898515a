"""What differs between two requests or two decisions, for people who compare plans and for ranks that disagree.

Results are frozen dataclasses of plain values; `to_wire` gives the tree that JSON and MessagePack take.
"""

from bucketplan_core.diff.decisions import BucketChange, BucketView, ChangeKind, DecisionDiff, diff_decisions
from bucketplan_core.diff.first import ABSENT, Difference, first_difference
from bucketplan_core.diff.requests import CollectiveChange, CollectiveView, RequestDiff, diff_requests

__all__ = [
    "ABSENT",
    "BucketChange",
    "BucketView",
    "ChangeKind",
    "CollectiveChange",
    "CollectiveView",
    "DecisionDiff",
    "Difference",
    "RequestDiff",
    "diff_decisions",
    "diff_requests",
    "first_difference",
]
