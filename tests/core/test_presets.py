"""Presets reproduce the figures of their sources and refuse whatever no source covers."""

import pytest

from bucketplan_core.errors import PlanningError
from bucketplan_core.presets import PRESETS, UNMEASURED, GroupShape, preset_fits, preset_names, resolve_preset


def protocols(name, size, nodes, op="all_gather"):
    found = resolve_preset(name, {"g": GroupShape(size, nodes)})
    return [(p.alpha_ns, p.bytes_per_us) for cost in found.collectives if cost.op == op for p in cost.protocols]


def test_published_latencies_and_bandwidths_of_h100_over_ndr():
    # Published: 81.5 / 148.4 / 296.8 us and 20.7 / 298 / 390 GB/s algorithm bandwidth on 8 nodes of 8.
    found = protocols("h100-ndr", 64, 8)
    assert [alpha for alpha, _ in found] == [81_500, 148_400, 296_800]
    for (_, rate), algorithm in zip(found, (20.7, 298, 390), strict=True):
        assert rate * 64 / 63 / 1_000 == pytest.approx(algorithm, rel=0.01)
    # and 314 / 564 / 1204 us, 20.5 / 295 / 386 GB/s on 32 nodes.
    found = protocols("h100-ndr", 256, 32)
    assert [round(alpha / 1_000) for alpha, _ in found] == [314, 564, 1_204]
    for (_, rate), algorithm in zip(found, (20.5, 295, 386), strict=True):
        assert rate * 256 / 255 / 1_000 == pytest.approx(algorithm, rel=0.01)


def test_published_figures_of_one_nic_a_rank():
    for ranks, microseconds in ((8, 91), (16, 178), (32, 353)):
        ((alpha, rate),) = protocols("ndr-1-per-node", ranks, ranks)
        assert alpha / 1_000 == pytest.approx(microseconds, rel=0.01)
        assert rate == 48_000


def test_published_figures_of_one_nvlink_node():
    assert protocols("h100-nvlink", 8, 1) == [(30_000, 360_000)]
    assert [alpha for alpha, _ in protocols("h100-nvlink", 4, 1)] == [17_000]
    assert [alpha for alpha, _ in protocols("h100-nvlink", 2, 1)] == [8_000]
    assert [alpha for alpha, _ in protocols("a100-nvlink", 8, 1)] == [32_200]


def test_an_all_reduce_goes_around_the_ring_twice():
    (alpha, rate), *_ = protocols("h100-ndr", 64, 8)
    (twice, same), *_ = protocols("h100-ndr", 64, 8, "all_reduce")
    assert (twice - 6_600, same) == (2 * (alpha - 6_600), rate)


@pytest.mark.parametrize("name", ["ascend-910b-8", "ascend-a3", "b200-nvlink-8"])
def test_nothing_is_invented_for_hardware_without_public_figures(name):
    with pytest.raises(PlanningError, match="measure it with `bucketplan calibrate`"):
        resolve_preset(name, {})
    assert not any(name.startswith(preset) for preset in preset_names())
    assert any(name.startswith(unmeasured) for unmeasured in UNMEASURED)


def test_uncovered_shapes_and_unknown_names_are_refused_with_the_role():
    with pytest.raises(PlanningError, match=r"64 ranks on 8 nodes of group 'fsdp'"):
        resolve_preset("h100-nvlink", {"fsdp": GroupShape(64, 8)})
    with pytest.raises(PlanningError, match="on how many nodes"):
        resolve_preset("h100-ndr", {"fsdp": GroupShape(64, 0)})
    with pytest.raises(PlanningError, match="known are h100-nvlink"):
        resolve_preset("h200", {})
    assert not preset_fits("h100-ndr", {"fsdp": GroupShape(65, 8)})
    assert preset_fits(
        "h100-ndr", {"fsdp": GroupShape(64, 8), "replicate": GroupShape(2, 2), "alone": GroupShape(1, 1)}
    )


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_every_preset_says_where_its_figures_come_from(preset):
    assert preset.source
    assert preset.accelerator.source
    assert preset.covers
    assert preset.trust
