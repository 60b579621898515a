"""core/README.md says what is true: every field is in its tables, and imports go the way that it draws."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import bucketplan_core
from bucketplan_core.legality import RULES
from bucketplan_core.planning import make_plan
from bucketplan_core.profile import CostProfile, WorkClass
from tests.core.test_decoding import small_request
from tests.support.paths import ROOT

README = (ROOT / "core" / "README.md").read_text()
PACKAGE = Path(bucketplan_core.__file__).parent


def section(title: str) -> str:
    """The text from the heading `title` to the next heading."""
    _, _, rest = README.partition(f"# {title}\n")
    assert rest, title
    return re.split(r"^#", rest, maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(title: str) -> list[str]:
    """Names in backquotes in the first column of the section's table."""
    rows = [line for line in section(title).splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def paths(tree: Any, prefix: str = "") -> set[str]:
    """Paths of a tree's fields, as the tables write them: lists of maps with [], columns as they are."""
    if isinstance(tree, dict) and tree:
        return {path for key, value in tree.items() for path in paths(value, f"{prefix}.{key}" if prefix else key)}
    if isinstance(tree, list) and tree and isinstance(tree[0], dict):
        return {path for entry in tree for path in paths(entry, f"{prefix}[]")}
    return {prefix}


def test_the_request_table_names_every_field() -> None:
    documented = set(first_cells("Request (schema 1)"))
    found = {re.sub(r"flops_per_us\..*", "flops_per_us", path) for path in paths(small_request().to_wire())}
    assert documented - {"options.hardware"} == found


@pytest.mark.parametrize(
    ("title", "tree"),
    [
        (
            "Cost profile (schema 1)",
            CostProfile(
                work=(WorkClass(name="<class>", flops=(), bytes_moved=()),), live_bytes=(), fixed_bytes=()
            ).to_wire(),
        ),
        ("Decision (schema 1)", make_plan(small_request()).decision.to_wire()),
    ],
)
def test_the_other_tables_name_every_field(title: str, tree: Any) -> None:
    assert set(first_cells(title)) == paths(tree)


def test_the_plan_table_names_every_field() -> None:
    assert set(first_cells("Plan (schema 1)")) == set(make_plan(small_request()).to_people())


def test_the_rules_are_those_that_are_checked_in_their_order() -> None:
    assert tuple(first_cells("Rules of legality")) == RULES


def test_every_module_imports_only_what_stands_above_it() -> None:
    title = "What lives where, and what may import what"
    rows = [line for line in section(title).splitlines() if line.startswith("| `")]
    level = {name: number for number, row in enumerate(rows) for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    modules = {path.stem if path.suffix else path.name: path for path in PACKAGE.iterdir()}
    assert set(level) <= set(modules)
    for name, own_level in level.items():
        path = modules[name]
        for file in [path] if path.is_file() else sorted(path.glob("*.py")):
            for imported in imports_of(file):
                if imported != name and imported in level:
                    assert level[imported] < own_level, f"{file.name} imports {imported}"


def imports_of(file: Path) -> set[str]:
    """Modules of core that `file` imports when it runs; annotations alone (TYPE_CHECKING) do not count."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {name.split(".")[1] for name in names if name.startswith("bucketplan_core.")}
