"""What is tracked: the agreed top level, pins that pip can use anywhere, and no trace of one machine."""

import re
import subprocess
import tomllib
from itertools import chain

from tests.support.paths import ROOT

TOP_LEVEL = {
    "pyproject.toml", "server", "client", "core", "tests", "deploy", "README.md", "LICENSE", "CHANGELOG.md",
    "CONTRIBUTING.md", "Makefile", "constraints.txt", ".ci", ".gitignore", ".gitattributes",
    ".pre-commit-config.yaml",
}  # fmt: skip

# Written in pieces, so that this file does not find itself.
WORKPLACE_PATHS = re.compile(
    r"(?<![\w.\-/}])/(?:" + "|".join(("wo" + "rk", "ro" + "ot", "opt/wh" + "eels", "tmp/" + "bp")) + r")/\w"
)
REGISTRY_HOSTS = re.compile(
    "|".join(("py" + r"pi\.org", r"python" + r"hosted\.org", r"npm" + r"js\.org", r"deb\." + r"debian\.org"))
)


def tracked_files() -> list[str]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listing.split("\0") if name and (ROOT / name).is_file()]


def findings(pattern: re.Pattern[str], text: str) -> list[str]:
    return [f"line {number}: {line.strip()[:160]}" for number, line in enumerate(text.splitlines(), 1)
            if pattern.search(line)]  # fmt: skip


def test_the_top_level_holds_only_what_was_agreed():
    top = {name.partition("/")[0] for name in tracked_files()}
    assert top <= TOP_LEVEL, f"unexpected at the top level: {sorted(top - TOP_LEVEL)}"
    assert [name for name in tracked_files() if name.startswith(".ci/")] == [".ci/run"]


def test_no_tracked_file_names_a_workplace_path_or_a_registry_host():
    found = {}
    for name in tracked_files():
        data = (ROOT / name).read_bytes()
        if b"\0" in data:
            continue
        text = data.decode()
        if lines := findings(WORKPLACE_PATHS, text) + findings(REGISTRY_HOSTS, text):
            found[name] = lines
    assert found == {}


def test_the_search_finds_what_it_looks_for():
    assert findings(WORKPLACE_PATHS, 'open("/' + 'work/main/x")')
    assert findings(WORKPLACE_PATHS, "cd /" + "root/x")
    assert not findings(WORKPLACE_PATHS, "see tests/" + "work/x and https://example.com/" + "work/x")
    assert findings(REGISTRY_HOSTS, "https://" + "py" + "pi.org/simple")


def test_every_constraint_is_one_exact_version():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    wrong = [line for line in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)]
    assert wrong == [], "no ranges, addresses, local paths or local version labels"
    assert pins == sorted(pins, key=str.upper)
    assert "torch==2.13.0" in pins


def test_every_direct_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    pinned = {canonical(line) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {canonical(requirement) for requirement in requirements} - pinned == set()


def test_what_must_be_there_before_make_is_said_as_ci_installs_it():
    """`.ci/run` brings it to a fresh machine; README.md says it in words, CONTRIBUTING.md as Debian's packages."""
    needed = re.findall(r"^need (\S+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert len(needed) > 5
    contributing = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Where things are")[0]
    assert set(needed) <= set(" ".join(re.findall(r"`([^`\n]+)`", contributing)).split())
    (said,) = re.findall(r"^Both need (.*?)\n\n", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    words = {"g++": "C++ compiler", "make": "GNU make", "prometheus": "promtool", "chromium": "Chromium"}
    assert {name for name in needed if words.get(name, name) not in said} == set()


def canonical(requirement: str) -> str:
    """The name of a requirement as registries compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement)[0]).lower()
