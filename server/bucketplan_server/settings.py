"""Every setting: an environment variable `BUCKETPLAN_<NAME>`, a flag of `bucketplan-server serve`, or a secret file."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from bucketplan_core.collectives import Options
from bucketplan_core.epoch import complete_options
from bucketplan_core.errors import BucketplanError, DecodeError
from bucketplan_core.planners import current_version
from bucketplan_core.wire import from_json

__all__ = ["SECRETS_VARIABLE", "Settings", "SettingsError", "check_tls", "load_settings"]

SECRETS_VARIABLE = "BUCKETPLAN_SECRETS_DIR"
"""Names a folder of files `BUCKETPLAN_<NAME>` (in any case), each with the value of one setting."""

_IN_MEMORY = ":memory:"


class SettingsError(Exception):
    """The settings cannot be used; the message names each one and what it must be."""


class Settings(BaseSettings):
    """What an operator can set. Times in seconds, sizes in bytes."""

    model_config = SettingsConfigDict(env_prefix="BUCKETPLAN_", extra="ignore", frozen=True)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8321, ge=0, le=65535, description="port to listen on; 0 takes a free one and logs it")
    database: str = Field(
        "bucketplan.db",
        description="path of the SQLite file, or a postgresql://user@host/name address shared by several replicas",
    )
    allow_anonymous: bool = Field(False, description="serve callers without a token on an address other than loopback")
    require_tokens: bool = Field(
        False, description="refuse callers without a token on loopback too, before the first token is made"
    )
    tls_certificate: str | None = Field(None, description="PEM file of the certificate chain; serves https with it")
    tls_key: str | None = Field(None, description="PEM file of the certificate's private key, without a passphrase")
    max_body_bytes: int = Field(32 * 2**20, ge=1024, le=2**31, description="largest body taken, after inflation")
    max_bodies_bytes: int = Field(
        512 * 2**20,
        ge=1024,
        le=2**46,
        description="what the bodies of all calls may hold at once, and again those in planning; above either 503",
    )
    body_timeout_seconds: float = Field(
        30.0,
        ge=0.01,
        le=3_600,
        description="longest wait for the next part of a body, and a tenth of the longest that a whole one may take",
    )
    plan_wait_seconds: float = Field(
        25.0,
        ge=0,
        le=600,
        description="longest wait for planning before 202, and of a reader for a post, whatever it asks for",
    )
    retry_after_seconds: int = Field(1, ge=0, le=3_600, description="Retry-After of 202 and 503 answers")
    max_waiters: int = Field(
        20_000,
        ge=1,
        le=2**20,
        description="calls that may wait for planning at once, and readers that may wait for a post; above either 503",
    )
    max_status_waiters: int = Field(
        1_000, ge=1, le=2**20, description="calls that may wait for an attempt to change at once; above it 503"
    )
    max_queued_plannings: int = Field(
        256, ge=1, le=2**20, description="signatures that may be in planning at once; above it 503"
    )
    planner_processes: int = Field(1, ge=1, le=64, description="processes that plan")
    planner_timeout_seconds: float = Field(
        600.0, ge=0.01, le=86_400, description="longest planning of one request before it is given up"
    )
    planner_memory_bytes: int = Field(
        8 * 2**30,
        ge=2**28,
        le=2**46,
        description="address space of one planning process, so that no body can exhaust the machine",
    )
    memory_cache_bytes: int = Field(512 * 2**20, ge=0, le=2**46, description="stored plans kept in memory")
    store_timeout_seconds: float = Field(
        10.0, ge=0.1, le=3_600, description="longest wait for the store before 503; a commit may take as long again"
    )
    refresh_seconds: float = Field(
        1.0,
        ge=0.01,
        le=3_600,
        description="how often changes made by other replicas are read; bounds how stale an answer can be",
    )
    drain_seconds: float = Field(
        5.0,
        ge=0,
        le=3_600,
        description="time between the stop signal (readiness off) and the end of accepting connections",
    )
    backlog: int = Field(4096, ge=1, le=2**20, description="connections the kernel may queue before they are accepted")
    expected_connections: int = Field(
        4096, ge=1, le=2**30, description="connections that must fit the limit of open files, checked at start"
    )
    planning_defaults: str = Field(
        "{}",
        description="JSON object of planning options for what the leader of an attempt leaves open",
    )
    stall_seconds: float = Field(
        60.0, ge=0.001, le=31_536_000, description="time after which an opening that misses ranks is stalled"
    )
    report_retention_days: int = Field(
        0,
        ge=0,
        le=36_500,
        description="days that reports of graphs are kept, 0 for ever; plans and openings always are",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    log_format: Literal["json", "console"] = Field("json", description="one JSON object a line, or coloured text")

    @field_validator("database")
    @classmethod
    def _known_database(cls, value: str) -> str:
        if "://" not in value:
            if not value.strip() or value == _IN_MEMORY:
                raise ValueError("must name a file or a postgresql:// address")
            return value
        try:
            url = make_url(value)
        except (ArgumentError, ValueError):
            raise ValueError("is not a database address; write postgresql://user@host/name") from None
        backend = url.get_backend_name()
        if not 0 < (url.port or 1) <= 65535:
            raise ValueError(f"{url.port} is no port; write postgresql://user@host:5432/name")
        if backend == "sqlite" and url.database in (None, "", _IN_MEMORY):
            raise ValueError("must name a file: sqlite:///path, or the path alone")
        if backend not in ("sqlite", "postgresql"):
            raise ValueError(f"{backend} is not supported; use a SQLite file or postgresql://")
        return value

    @field_validator("planning_defaults")
    @classmethod
    def _known_options(cls, value: str) -> str:
        try:
            _read_options(value)
        except BucketplanError as error:
            raise ValueError(str(error)) from None
        return value

    @property
    def default_options(self) -> Options:
        """Complete planning options: the built-in ones with `planning_defaults` over them."""
        return _read_options(self.planning_defaults)

    @property
    def sqlite_path(self) -> Path | None:
        """The file of the SQLite store, None when another store is set."""
        if "://" not in self.database:
            return Path(self.database)
        url = make_url(self.database)
        return Path(url.database or "") if url.get_backend_name() == "sqlite" else None

    @property
    def needs_tokens(self) -> bool:
        """Whether callers need a token even while none was ever made."""
        return self.require_tokens or not (self.listens_on_loopback or self.allow_anonymous)

    @property
    def listens_on_loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def _read_options(text: str) -> Options:
    tree = from_json(text.encode())
    if not isinstance(tree, dict):
        raise DecodeError("planning_defaults", tree, "must be a JSON object of planning options")
    built_in = Options(strategy="size", planner=current_version("size"))
    return complete_options(tree, built_in, path="planning_defaults")


def load_settings(**flags: object) -> Settings:
    """Settings from flags, then environment, then files of `BUCKETPLAN_SECRETS_DIR`, then defaults.

    Raises `SettingsError` naming what is wrong.
    """
    given: dict[str, object] = {name: value for name, value in flags.items() if value is not None}
    folder = os.environ.get(SECRETS_VARIABLE) or None
    if folder is not None and not Path(folder).is_dir():
        raise SettingsError(f"{SECRETS_VARIABLE}: {folder} is not a folder; mount the secrets there or unset it")
    try:
        settings = Settings(**(given | {"_secrets_dir": folder}))  # type: ignore[arg-type]  # pydantic checks each
    except OSError as error:
        raise SettingsError(f"{SECRETS_VARIABLE}: {error.filename} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        lines = [f"{_names(str(problem['loc'][0]))}: {problem['msg']}" for problem in error.errors()]
        raise SettingsError("; ".join(lines)) from None
    if settings.require_tokens and settings.allow_anonymous:
        raise SettingsError(f"{_names('allow_anonymous')} contradicts {_names('require_tokens')}; set one of them")
    for one, other in (("tls_certificate", "tls_key"), ("tls_key", "tls_certificate")):
        if getattr(settings, one) and not getattr(settings, other):
            raise SettingsError(f"{_names(other)}: must be given with {_names(one)}, which is {getattr(settings, one)}")
    return settings


def check_tls(settings: Settings) -> None:
    """Raises `SettingsError` unless the certificate and its key, where they are set, can be served with."""
    if not settings.tls_certificate or not settings.tls_key:
        return
    for name in ("tls_certificate", "tls_key"):
        try:
            Path(getattr(settings, name)).read_bytes()
        except OSError as error:
            raise SettingsError(f"{_names(name)}: {getattr(settings, name)} cannot be read: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An empty passphrase: without one OpenSSL would ask for it on the terminal.
        context.load_cert_chain(settings.tls_certificate, settings.tls_key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise SettingsError(
            f"{_names('tls_certificate')}, {_names('tls_key')}: {settings.tls_certificate} and {settings.tls_key} are "
            f"no PEM certificate and its unencrypted key: {error}"
        ) from None


def _names(field: str) -> str:
    return f"--{field.replace('_', '-')} (BUCKETPLAN_{field.upper()})"
