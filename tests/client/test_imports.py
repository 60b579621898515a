"""What importing the client loads, asked of fresh interpreters."""

from __future__ import annotations

import subprocess
import sys

import pytest

import bucketplan_client

HEAVY = ("torch", "httpx", "tenacity", "typer", "rich", "click", "bucketplan_server", "pydantic", "numpy")


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_package_alone_loads_nothing_of_weight():
    assert not modules_after("import bucketplan_client") & set(HEAVY)


def test_everything_but_the_hook_leaves_inductor_and_the_cli_alone():
    loaded = modules_after(
        "import bucketplan_client\nfor name in bucketplan_client.__all__:\n    getattr(bucketplan_client, name)"
    )
    assert "torch" in loaded
    assert not loaded & {"torch._inductor", "torch._dynamo", "typer", "rich", "bucketplan_server", "pydantic"}


@pytest.mark.parametrize("name", bucketplan_client.__all__)
def test_every_public_name_is_there_and_listed(name):
    assert getattr(bucketplan_client, name) is not None
    assert name in dir(bucketplan_client)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = bucketplan_client.no_such_name
