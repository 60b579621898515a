"""A planning server of one's own: started on a free port, asked, killed, started again."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

__all__ = ["PlanningServer", "ServerDidNotStart"]

_START_TIMEOUT_S = 60.0


class ServerDidNotStart(Exception):
    """The server ended or was not ready in time; the message holds the end of its log."""


class PlanningServer:
    """`bucketplan-server serve` on loopback over one SQLite file; its log goes to a file beside it."""

    def __init__(self, folder: Path) -> None:
        self.database = folder / "plans.db"
        self.log = folder / "server.log"
        self.port = _free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._http = httpx.Client(base_url=self.address, timeout=10.0, trust_env=False)

    def __enter__(self) -> PlanningServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        self._http.close()

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until it is ready; raises `ServerDidNotStart`."""
        command = [
            *(sys.executable, "-m", "bucketplan_server", "serve"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--database", str(self.database)),
            *("--drain-seconds", "0"),
        ]
        with self.log.open("ab") as log:
            # A session of its own: an interrupt at the terminal reaches us first, and we end the server.
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                tail = self.log.read_text(errors="replace")[-2000:]
                raise ServerDidNotStart(f"no ready server at {self.address}; the end of {self.log}:\n{tail}")
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL: no chance to write anything down."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End the server as an operator would, and make sure that it has ended."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=15.0)
        except subprocess.TimeoutExpired:
            self.kill()

    def detach(self) -> None:
        """Leave the server running when this program ends."""
        self._process = None

    def metric(self, name: str, **labels: str) -> float:
        """The value of one metric, 0.0 where it has no sample yet."""
        for line in self._http.get("/metrics").raise_for_status().text.splitlines():
            key, _, value = line.rpartition(" ")
            if key.partition("{")[0] == name and all(f'{label}="{text}"' in key for label, text in labels.items()):
                return float(value)
        return 0.0

    def plan(self, signature: str) -> dict[str, Any]:
        """The plan of `signature` as people read it."""
        answer = self._http.get(f"/v1/plans/{signature}", headers={"Accept": "application/json"}).raise_for_status()
        plan: dict[str, Any] = answer.json()
        return plan

    def _is_ready(self) -> bool:
        try:
            return self._http.get("/readyz", timeout=1.0).status_code == 200
        except httpx.TransportError:
            return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
