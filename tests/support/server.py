"""A real server in a process of its own, on a free loopback port with a real database file.

with running_server(tmp_path, plan_wait_seconds=5) as server:
    httpx.get(f"{server.url}/healthz")
    server.kill()       # SIGKILL
    server.restart()    # same port, same database
"""

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.paths import ROOT

_START_SECONDS = 60.0
FAULTS = ROOT / "tests" / "support" / "faults"


class ServerFailed(Exception):
    """The server ended before it was ready; the message is its log."""


class RunningServer:
    """One server process; `url` stays the same over restarts. Settings are those of `bucketplan_server.settings`."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, object],
        *,
        planning_seconds: float,
        command: Sequence[str],
        environment: dict[str, str],
    ) -> None:
        self.folder = folder
        self.database = str(settings.get("database") or folder / "bucketplan.db")
        self.log = folder / "server.log"
        self.port = int(str(settings.get("port") or free_port()))
        scheme = "https" if settings.get("tls_certificate") else "http"
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        # Tests check certificates with their own clients; here only whether it runs.
        self._tls = ssl._create_unverified_context() if scheme == "https" else None
        self._command = command
        self._environment = environment
        self._settings = {"drain_seconds": 0, **settings, "database": self.database, "port": self.port}
        self._planning_seconds = planning_seconds
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the server (its planning processes are its children)."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns when the server answers `/readyz`; raises `ServerFailed` with its log."""
        environment = {**os.environ, **self._environment}
        for name in [name for name in environment if name.startswith("BUCKETPLAN_")]:
            if name != "BUCKETPLAN_GRAPHS":
                del environment[name]
        environment |= {f"BUCKETPLAN_{name.upper()}": _text(value) for name, value in self._settings.items()}
        if self._planning_seconds:
            # Python imports `sitecustomize` from there in the server and in its planning processes.
            path = environment.get("PYTHONPATH", "")
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FAULTS), path]))
            environment["TEST_PLANNING_SECONDS"] = str(self._planning_seconds)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, "serve"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise ServerFailed(self.log.read_text())
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL: nothing of the server gets to say goodbye."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def terminate(self, timeout: float = 60.0) -> int:
        """SIGTERM; answers the exit status once the server has drained."""
        assert self._process is not None, "the server is not running"
        self._process.send_signal(signal.SIGTERM)
        return self.wait(timeout)

    def wait(self, timeout: float = 60.0) -> int:
        """The exit status, once the server has ended."""
        assert self._process is not None, "the server is not running"
        status = self._process.wait(timeout)
        self._process = None
        return status

    def restart(self, **settings: object) -> None:
        """Start again on the same port and database (killing what still runs), with changed settings."""
        self.kill()
        self._settings |= settings
        self.start()

    def metric(self, name: str, **labels: str) -> float:
        """The value of one metric now, 0 where it was never counted."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10, context=self._tls) as response:
            text = response.read().decode()
        inner = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        wanted = f"{name}{{{inner}}}" if labels else name
        for line in text.splitlines():
            found, _, value = line.rpartition(" ")
            if found == wanted:
                return float(value)
        return 0.0

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5, context=self._tls) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def wait_for_gauge(server: RunningServer, name: str) -> None:
    """Returns when this gauge is above 0."""
    deadline = time.monotonic() + 30
    while server.metric(name) == 0:
        assert time.monotonic() < deadline, f"{name} stays 0"
        time.sleep(0.01)


def wait_for_planning(server: RunningServer) -> None:
    """Returns when a planning is in progress."""
    wait_for_gauge(server, "bucketplan_plannings_in_progress")


def free_port() -> int:
    """A port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_server(
    folder: Path,
    *,
    planning_seconds: float = 0.0,
    command: Sequence[str] = (sys.executable, "-m", "bucketplan_server"),
    environment: dict[str, str] | None = None,
    **settings: object,
) -> Iterator[RunningServer]:
    """A server with its database and log in `folder`, ready; killed at the end.

    `settings` are names of `Settings` (``plan_wait_seconds=5``). `planning_seconds` makes every planning take that much
    longer. `command` and `environment` start another installation.
    """
    server = RunningServer(
        folder, settings, planning_seconds=planning_seconds, command=command, environment=environment or {}
    )
    server.start()
    try:
        yield server
    finally:
        server.kill()


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
