"""The files of deploy/ as data."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bucketplan_server.settings import Settings
from tests.support.paths import ROOT

DEPLOY = ROOT / "deploy"


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile: its name, and the rest with continuation lines joined."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """The arguments, of either form."""
        return json.loads(self.text) if self.text.startswith("[") else shlex.split(self.text)


def dockerfile() -> list[Instruction]:
    text = re.sub(r"^#.*\n", "", (DEPLOY / "docker" / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [Instruction(*line.split(" ", 1)) for line in lines if line.strip()]


def copied_sources() -> list[str]:
    """What the image takes from the build context."""
    sources = []
    for instruction in dockerfile():
        if instruction.name == "COPY" and "--from=" not in instruction.text:
            sources += [word for word in instruction.words if not word.startswith("--")][:-1]
    return sources


def load_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def compose() -> dict[str, Any]:
    return load_yaml(DEPLOY / "compose" / "compose.yaml")


def base_manifests() -> dict[str, dict[str, Any]]:
    """The resources of the Kubernetes base by kind."""
    base = DEPLOY / "kubernetes" / "base"
    loaded = [load_yaml(base / name) for name in load_yaml(base / "kustomization.yaml")["resources"]]
    return {resource["kind"]: resource for resource in loaded}


def settings_of(variables: dict[str, str]) -> Settings:
    """The server's settings under these variables, what is no setting left out; raises where a value is not valid."""
    names = {f"BUCKETPLAN_{name.upper()}": name for name in Settings.model_fields}
    return Settings(**{names[key]: value for key, value in variables.items() if key in names})


def stopping_seconds(settings: Settings) -> float:
    """The longest that a stop may take: draining, then the longest wait of a post and 10 s for what is in flight."""
    return settings.drain_seconds + settings.plan_wait_seconds + 10


def seconds(text: str) -> float:
    """A duration as compose writes it (`50s`, `2m`)."""
    number, unit = re.fullmatch(r"(\d+)(s|m)", text).groups()
    return int(number) * {"s": 1, "m": 60}[unit]
