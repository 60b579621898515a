"""The snippets of the READMEs that users copy run as they are written, on gloo ranks, and ask a real server."""

from __future__ import annotations

import re

import pytest

from tests.support.gloo_pool import gloo_pool
from tests.support.paths import ROOT
from tests.support.server import running_server

RANKS = "tests.support.readme_ranks"
SECTION = (ROOT / "README.md").read_text().partition("## Put it into your job")[2].partition("\n## ")[0]
SNIPPETS = re.findall(r"^\*\*(.+?)\*\*.*?```python\n(.*?)```", SECTION, re.MULTILINE | re.DOTALL)
BY_TITLE = {title.rstrip("."): code for title, code in SNIPPETS}
CLIENT = dict(
    re.findall(
        r"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```",
        (ROOT / "client" / "README.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
)


@pytest.fixture
def address(tmp_path):
    with running_server(tmp_path) as server:
        yield server.url


def test_every_way_in_has_a_snippet():
    assert set(BY_TITLE) == {"Plain torch.compile", "torchtitan", "HyperParallel", "Your own fx pass"}
    for title, code in BY_TITLE.items():
        compile(code, title, "exec")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("snippets", [BY_TITLE, CLIENT], ids=["README", "client/README"])
def test_the_snippet_for_torch_compile_trains_as_without(snippets, address):
    for result in gloo_pool(2).run(f"{RANKS}:under_compile", snippets["Plain torch.compile"], address, timeout_s=800.0):
        eager, planned = result["losses"]
        assert planned == pytest.approx(eager, rel=1e-5)
        assert result["worst_gradient"] < 1e-5
        before, after = result["launches"]
        assert sum(after.values()) < sum(before.values())


def test_the_snippet_for_an_own_pass_trains_as_without(address, capfd):
    for result in gloo_pool(2).run(f"{RANKS}:own_pass", BY_TITLE["Your own fx pass"], address):
        unbucketed, bucketed = result["losses"]
        assert bucketed == unbucketed
        before, after = result["launches"]
        assert after < before


def test_the_clients_readme_has_a_snippet_for_every_framework():
    # The snippet for tests of users is run in tests/client.
    assert set(CLIENT) - {"Testing your integration"} == {"Plain torch.compile", "torchtitan", "HyperParallel"}


@pytest.mark.parametrize("snippets", [BY_TITLE, CLIENT], ids=["README", "client/README"])
def test_the_snippet_for_hyperparallel_trains_as_without(snippets, address):
    for result in gloo_pool(2).run(f"{RANKS}:hyperparallel", snippets["HyperParallel"], address):
        unbucketed, bucketed = result["losses"]
        assert bucketed == unbucketed
        before, after = result["launches"]
        assert after < before


@pytest.mark.parametrize("snippets", [BY_TITLE, CLIENT], ids=["README", "client/README"])
def test_the_snippet_for_torchtitan_registers_its_pipeline(snippets, address):
    for passes in gloo_pool(2).run(f"{RANKS}:torchtitan", snippets["torchtitan"], address, timeout_s=300.0):
        assert "bucketing_pass" in passes
