"""The demo's model and sharding pass for tests; they live in deploy/demo, as its `demojob` package."""

from __future__ import annotations

import sys

from tests.support.paths import ROOT

_DEMO = str(ROOT / "deploy" / "demo")
if _DEMO not in sys.path:
    sys.path.append(_DEMO)

from demojob.corpus import CORPUS, read_corpus, sample_batch  # noqa: E402  (after the path is set)
from demojob.fsdp import VIEWS, FsdpPolicy, RankGroup, ShardedGraph, shard_graph  # noqa: E402  (after the path is set)
from demojob.model import Transformer, TransformerConfig  # noqa: E402  (after the path is set)
from demojob.trace import JointGraph, trace_joint  # noqa: E402  (after the path is set)
from demojob.training import Trainer, shards_of  # noqa: E402  (after the path is set)

__all__ = [
    "CORPUS",
    "SMALL",
    "VIEWS",
    "FsdpPolicy",
    "JointGraph",
    "RankGroup",
    "ShardedGraph",
    "Trainer",
    "Transformer",
    "TransformerConfig",
    "read_corpus",
    "sample_batch",
    "shard_graph",
    "shards_of",
    "trace_joint",
]

SMALL = TransformerConfig(dim=32, num_layers=2, num_heads=2, hidden_dim=48, max_tokens=16, moe_layer=1)
"""A model with every kind of parameter that traces in about a second."""
