"""Servers that need tokens: their secrets, calls with them, what they refused, and the bodies that ranks send."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import httpx

from bucketplan_core.attempt import AttemptRequest, RankReport
from bucketplan_core.wire import pack
from bucketplan_server import cli_tokens
from bucketplan_server.settings import load_settings
from tests.support.documents import MSGPACK
from tests.support.server import RunningServer

REFRESH_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Guarded:
    """A server that needs tokens, and the secrets of some."""

    server: RunningServer
    secrets: dict[str, str]

    def call(self, token: str | None, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {**options.pop("headers", {})}
        if token is not None:
            headers["Authorization"] = f"Bearer {self.secrets[token]}"
        return httpx.request(method, f"{self.server.url}{path}", headers=headers, timeout=30, **options)

    def post(self, token: str | None, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return self.call(token, "POST", path, content=pack(body), headers=MSGPACK | headers)

    def refusals(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.server.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == "access.refused"]


def make_token(database: str, name: str, role: str, *, namespace: str | None = None, expires: str | None = None) -> str:
    settings = load_settings(database=database, refresh_seconds=REFRESH_SECONDS)
    return cli_tokens.create(settings, name, role=role, namespace=namespace, expires=expires, reason="test")


def wait_until(holds: Callable[[], object]) -> None:
    ends = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.02)


def open_body(key: str) -> dict[str, Any]:
    return cast("dict[str, Any]", AttemptRequest(key=key, participants={"fsdp": ((0,),)}, options={}).to_wire())


def report_body(signature: str | None) -> dict[str, Any]:
    return {"reports": [RankReport(rank=0, slot="joint", signature=signature).to_wire()]}
