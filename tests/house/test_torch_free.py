"""core and server work where torch is not: first with torch refused, then in an environment that never had it."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.server_env import environment_of_its_own

IMPORT_EVERYTHING = textwrap.dedent(
    """
    import importlib, json, pkgutil, sys

    refused = set(sys.argv[2:])

    class Refusal:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in refused:
                raise ImportError(f"{name} is refused here")

    sys.meta_path.insert(0, Refusal())
    package = importlib.import_module(sys.argv[1])
    names = [package.__name__]
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        # `__main__` runs the program, and a migration runs only inside Alembic's environment.
        if not module.name.endswith(("__main__", ".env")):
            importlib.import_module(module.name)
            names.append(module.name)
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] in refused)
    print(json.dumps({"imported": names, "loaded": loaded}))
    """
)

CORE_REFUSES = [
    "torch", "bucketplan_server", "bucketplan_client", "fastapi", "starlette", "uvicorn", "httpx", "jinja2",
    "pydantic", "typer", "sqlalchemy", "alembic", "aiosqlite", "asyncpg", "sqlite3",
]  # fmt: skip
SERVER_REFUSES = ["torch", "bucketplan_client"]


def import_everything(python: Path | str, package: str, refused: list[str], **options) -> dict[str, list[str]]:
    done = subprocess.run(
        [python, "-c", IMPORT_EVERYTHING, package, *refused],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("package", "refused"), [("bucketplan_core", CORE_REFUSES), ("bucketplan_server", SERVER_REFUSES)]
)
def test_every_module_imports_with_the_forbidden_packages_refused(package, refused):
    outcome = import_everything(sys.executable, package, refused)
    assert outcome["loaded"] == []
    assert package in outcome["imported"]


def test_the_refusal_refuses():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING, "torch", "torch"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "torch is refused here" in done.stderr


def test_the_installed_server_imports_where_torch_never_was(torch_free_bin, tmp_path):
    def run(*command):
        return subprocess.run(
            command, env=environment_of_its_own(), cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, check=False,
        )  # fmt: skip

    python = torch_free_bin / "python"
    assert "No module named 'torch'" in run(python, "-c", "import torch").stderr

    where = run(python, "-c", "import bucketplan_server; print(bucketplan_server.__file__)").stdout
    assert where.startswith(str(torch_free_bin.parent)), "the installed package is tested, not the working tree"

    for package in ("bucketplan_core", "bucketplan_server"):
        outcome = import_everything(python, package, [], env=environment_of_its_own(), cwd=tmp_path)
        assert package in outcome["imported"]


def test_the_installed_server_command_explains_itself_without_torch(torch_free_bin, tmp_path):
    done = subprocess.run(
        [torch_free_bin / "bucketplan-server", "--help"], env=environment_of_its_own(), cwd=tmp_path,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout
