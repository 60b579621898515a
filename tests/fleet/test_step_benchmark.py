"""The benchmark of predicted against measured steps runs on real ranks, and says what two cores cannot show."""

from tests.benchmarks import bench_steps, harness


def test_five_plans_are_predicted_and_measured_side_by_side(tmp_path):
    result = bench_steps.run(small=True, rounds=2)
    harness.write("steps", result, folder=tmp_path)
    lines = result.notes.splitlines()
    names = ["none_original", "none_scheduled", "size_scheduled", "module_scheduled", "auto_scheduled"]
    assert [line.split(" | ")[0].removeprefix("| ").replace(", ", "_") for line in lines[2:7]] == names
    assert lines[7] == bench_steps.CANNOT_SHOW
    for name in names:
        assert result.figures[f"measured_ns_{name}"] >= result.figures[f"measured_least_ns_{name}"] > 0
    # Chosen by cost under the ranks' own figures: what `auto` promises holds for them, too.
    predicted = {name: result.figures[f"predicted_ns_{name}"] for name in names if name != "module_scheduled"}
    assert predicted["auto_scheduled"] == min(predicted.values())
