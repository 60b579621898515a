"""Latency and bandwidth of a group from its shape, one function a fabric; None where no source covers the shape.

Sources, by tag:

- [nccl] NCCL's tuning.cc and topo.h: ring latency is a base plus one term a hop, hops inside a node and between nodes
  counted apart. N ranks on V nodes, microseconds: LL 6.6 + (N-V)*x + (V-1)*2.7 with x = 0.6 on one node, else 1.0;
  LL128 14 + (N-V)*1.9 + (V-1)*4.0; SIMPLE 8.4 + (N-V)*3.4 + (V-1)*14.
- [autoparallel] latency tables captured from NCCL 2.27.5 logs, published in the AutoParallel repository: the closed
  form reproduces all 60 H100 entries. Algorithm bandwidth of 8 nodes of 8 H100 over NDR: 20.7 / 298 / 390 GB/s for LL
  / LL128 / SIMPLE; of 32 nodes 20.5 / 295 / 386. Bus bandwidth is (N-1)/N of it: 20.4 / 293.5 / 384 in both cases.
- [nccl-tests] published runs: 8 A100 on NVLink about 208 GB/s bus bandwidth in all-reduce, 240 by NCCL's formula.

Rates are bytes a microsecond, which is MB/s. All bandwidths here are bus bandwidths, since the cost model applies
(N-1)/N itself. An all-reduce takes both halves of a ring, so its hop terms count twice and its base once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bucketplan_core.hardware import Protocol

__all__ = [
    "Fabric",
    "GroupShape",
    "a100_hdr",
    "a100_nvlink",
    "gloo_loopback",
    "h100_ndr",
    "h100_nvlink",
    "one_nic_a_rank",
]


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Ranks of a group and the hosts they stand on."""

    size: int
    nodes: int

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks on each host, None unless all hosts hold equally many."""
        return self.size // self.nodes if self.nodes and self.size % self.nodes == 0 else None


Fabric = Callable[[GroupShape, int], tuple[Protocol, ...] | None]
"""(shape, passes around the ring: 1, or 2 for an all-reduce) -> protocols, or None for a shape that no source
covers.
"""

_LL = (6_600, 600, 1_000, 2_700)
_LL128 = (14_000, 1_900, 1_900, 4_000)
_SIMPLE = (8_400, 3_400, 3_400, 14_000)
"""ns: base, hop inside a single node, hop inside one of several nodes, hop between nodes [nccl]."""


def _ring_alpha_ns(terms: tuple[int, int, int, int], shape: GroupShape, passes: int) -> int:
    base, one_node_hop, node_hop, network_hop = terms
    inside = (shape.size - shape.nodes) * (one_node_hop if shape.nodes == 1 else node_hop)
    return base + passes * (inside + (shape.nodes - 1) * network_hop)


def h100_nvlink(shape: GroupShape, passes: int) -> tuple[Protocol, ...] | None:
    """H100 on one NVLink node. 2, 4 and 8 ranks: latency and bandwidth fitted to published measurements; 3, 5, 6, 7
    ranks: SIMPLE latency of the closed form at the bandwidth of 8, the fit that promises least."""
    if shape.nodes != 1 or not 2 <= shape.size <= 8:
        return None
    # Fitted: 8 / 17 / 30 us; algorithm bandwidths 537 / 434 / 394 GB/s, of which (N-1)/N is 268.5 / 325.5 / 345 GB/s.
    # For 8 ranks the fit of larger messages gives 360 GB/s bus (370 by formula).
    fitted = {2: (8_000, 268_500), 4: (17_000, 325_500), 8: (30_000, 360_000)}
    if shape.size in fitted:
        alpha, rate = fitted[shape.size]
        base = _SIMPLE[0]
        return (Protocol(alpha + (passes - 1) * max(alpha - base, 0), rate),)
    return (Protocol(_ring_alpha_ns(_SIMPLE, shape, passes), 360_000),)


def h100_ndr(shape: GroupShape, passes: int) -> tuple[Protocol, ...] | None:
    """H100 nodes with one 400G NIC a GPU. 8 ranks a node: [nccl] latencies and [autoparallel] bandwidths, checked at
    8 and 32 nodes; fewer ranks a node: the same latencies, 48 GB/s for each NIC in use; one node: `h100_nvlink`."""
    if shape.nodes == 1:
        return h100_nvlink(shape, passes)
    per_node = shape.ranks_per_node
    if per_node is None or per_node > 8:
        return None
    if per_node == 1:
        return one_nic_a_rank(shape, passes)
    simple = 48_000 * per_node
    return (
        Protocol(_ring_alpha_ns(_LL, shape, passes), min(20_400, simple // 2)),
        Protocol(_ring_alpha_ns(_LL128, shape, passes), min(293_500, simple * 92 // 100)),
        Protocol(_ring_alpha_ns(_SIMPLE, shape, passes), simple),
    )


def one_nic_a_rank(shape: GroupShape, passes: int) -> tuple[Protocol, ...] | None:
    """One rank a host with a 400G NIC: 3 + 10.9 N us and 48 GB/s, fitted at 8, 16 and 32 hosts (91 / 178 / 353 us)."""
    if shape.size < 2 or shape.nodes != shape.size or shape.size > 64:
        return None
    return (Protocol(3_000 + passes * 10_900 * shape.size, 48_000),)


def a100_nvlink(shape: GroupShape, passes: int) -> tuple[Protocol, ...] | None:
    """8 A100 on one NVLink node: SIMPLE latency 32 us [nccl], 208 GB/s bus as reported for all-reduce [nccl-tests]."""
    if shape.nodes != 1 or shape.size != 8:
        return None
    return (Protocol(_ring_alpha_ns(_SIMPLE, shape, passes), 208_000),)


def a100_hdr(shape: GroupShape, passes: int) -> tuple[Protocol, ...] | None:
    """A100 nodes of 8 with one 200G NIC a GPU: SIMPLE latency [nccl], 25 GB/s line rate a NIC; low trust, nothing
    measured.
    """
    if shape.nodes == 1:
        return a100_nvlink(shape, passes)
    if shape.ranks_per_node != 8:
        return None
    return (Protocol(_ring_alpha_ns(_SIMPLE, shape, passes), 25_000 * 8),)


def gloo_loopback(shape: GroupShape, passes: int) -> tuple[Protocol, ...] | None:
    """gloo between processes of one host: 620 us and 0.32 GB/s as measured for 2 ranks on a 2-core virtual machine, the
    latency scaled by hops for more."""
    if shape.nodes != 1 or not 2 <= shape.size <= 8:
        return None
    return (Protocol(passes * 620_000 * (shape.size - 1), 320),)
