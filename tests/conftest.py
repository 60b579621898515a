"""What every test gets: fixed seeds, no network look-ups, caches under build/, and failures that name their seed."""

import os
from collections.abc import Generator
from pathlib import Path

import hypothesis
import hypothesis.configuration
import pytest

from tests.support import counts
from tests.support.paths import BUILD, ROOT, graphs_dir
from tests.support.server_env import torch_free_environment

# Libraries that would ask a hub or a tracker must answer from what is installed.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
# No test writes into a user's cache, or finds what another one kept there; those that want one name its folder.
os.environ["BUCKETPLAN_CACHE"] = os.devnull
# A rank or server that a test starts finds `tests` as this process does, wherever it runs.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

hypothesis.configuration.set_hypothesis_home_dir(BUILD / "hypothesis")
# No deadline: a slow machine is no bug, and nothing here judges time. `make test` draws the same examples in every
# run, so that a red run is a change; a soak draws new ones and prints how to repeat a failure.
hypothesis.settings.register_profile("test", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("soak", deadline=None, derandomize=False, print_blob=True)
hypothesis.settings.load_profile("soak" if counts.soaking() else "test")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    counts.clear_current_seeds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and (text := counts.describe_current_seeds()):
        report.sections.append(("seeds", text))
    return report


@pytest.fixture(scope="session")
def recorded_graphs() -> Path:
    """The folder of recorded graphs (see tests/support/paths.py)."""
    return graphs_dir()


@pytest.fixture(scope="session")
def torch_free_bin() -> Path:
    """The bin/ of a virtual environment with `bucketplan[server]` as a user installs it, where torch is not."""
    return torch_free_environment()
