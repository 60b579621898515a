"""What each package imports is what pyproject.toml declares for it: nothing comes by way of another distribution."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions

import pytest

from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"bucketplan_core", "bucketplan_client", "bucketplan_server"}
DECLARED_FOR = {"core": (), "client": ("client",), "server": ("server",)}
ON_REQUEST = {
    "matplotlib": "`bucketplan calibrate --plot` says that it is missing",
    "torchtitan": "only who trains with it registers a pass with it",
}
"""Packages that a module imports where its user has them; nobody else needs them."""
LOADED_BY_NAME = {
    "aiosqlite": "SQLAlchemy loads it for sqlite+aiosqlite",
    "asyncpg": "SQLAlchemy loads it for postgresql+asyncpg",
    "httptools": "uvicorn loads it",
}
"""Packages that are declared though no module imports them."""


def normal(name: str) -> str:
    """A distribution's name as registries compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(extras: tuple[str, ...]) -> set[str]:
    requirements = [*PROJECT["dependencies"]]
    for extra in extras:
        requirements += PROJECT["optional-dependencies"][extra]
    return {normal(re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]) for requirement in requirements}


def imported(root: str) -> Iterator[tuple[str, str]]:
    """Top-level packages that a module below `root` imports anywhere, each with the module."""
    for path in sorted((ROOT / root).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
                names = [node.module]
            for name in names:
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names and top not in OURS:
                    yield top, str(path.relative_to(ROOT))


@pytest.mark.parametrize("root", DECLARED_FOR)
def test_every_import_is_declared(root):
    owners = packages_distributions()
    known = declared(DECLARED_FOR[root])
    missing = {
        f"{module} imports {top}"
        for top, module in imported(root)
        if top not in ON_REQUEST and not {normal(owner) for owner in owners.get(top, [top])} & known
    }
    assert not missing


@pytest.mark.parametrize("root", DECLARED_FOR)
def test_every_declaration_is_imported(root):
    owners = packages_distributions()
    used = {normal(owner) for top, _ in imported(root) for owner in owners.get(top, [top])}
    shared = set() if root == "core" else declared(())
    assert declared(DECLARED_FOR[root]) - shared - used - set(LOADED_BY_NAME) == set()
