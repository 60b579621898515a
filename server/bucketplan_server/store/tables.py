"""The tables, once for both databases. Migrations build them; nothing is ever updated but `active` and when a
token was revoked.

Times are nanoseconds since 1970 (UTC). Digests are SHA-256 over uncompressed bytes in hex.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

__all__ = [
    "active",
    "attempts",
    "epochs",
    "events",
    "hardware_profiles",
    "job_signatures",
    "metadata",
    "profiles",
    "quarantine",
    "reports",
    "revisions",
    "signatures",
    "tokens",
]

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
    }
)

_DIGEST = String(64)

profiles = Table(
    "profiles",
    metadata,
    Column("digest", _DIGEST, primary_key=True),
    Column("profile", LargeBinary, nullable=False),
)
"""Cost profiles by digest, canonical bytes."""

signatures = Table(
    "signatures",
    metadata,
    Column("signature", _DIGEST, primary_key=True),
    Column("request", LargeBinary, nullable=False),
    Column("profile", _DIGEST, ForeignKey("profiles.digest"), nullable=False),
    Column("strategy", Text, nullable=False),
    Column("phase", Text, nullable=False),
    Column("num_candidates", Integer, nullable=False),
    Column("groups", Text, nullable=False),
    Column("parameters", Text, nullable=False),
    Column("modules", Text, nullable=False),
    Column("created_ns", BigInteger, nullable=False),
    Column("actor", Text, nullable=False),
    Index("ix_signatures_created_ns", "created_ns", "signature"),
)
"""Requests by signature, each bound for ever to the first profile that came with it.

`groups`, `parameters` and `modules` are names, one a line, copied from the request so that they can be searched."""

revisions = Table(
    "revisions",
    metadata,
    Column("signature", _DIGEST, ForeignKey("signatures.signature"), primary_key=True),
    Column("revision", Integer, primary_key=True, autoincrement=False),
    Column("digest", _DIGEST, nullable=False),
    Column("plan", LargeBinary, nullable=False),
    Column("plan_sha256", _DIGEST, nullable=False),
    Column("origin", Text, nullable=False),
    Column("planner", Text, nullable=False),
    Column("options", LargeBinary, nullable=False),
    Column("parent", Integer),
    Column("created_ns", BigInteger, nullable=False),
    Column("actor", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Index("ix_revisions_digest", "digest"),
)
"""Plans of each signature, 1 being the planner's own. `digest` is the decision's, `plan_sha256` the whole body's."""

active = Table(
    "active",
    metadata,
    Column("signature", _DIGEST, ForeignKey("signatures.signature"), primary_key=True),
    Column("job", Text, primary_key=True),
    Column("revision", Integer, nullable=False),
    Column("changed_ns", BigInteger, nullable=False),
)
"""Which revision is served: for everyone where `job` is empty, else for that job alone."""

events = Table(
    "events",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("at_ns", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("signature", _DIGEST),
    Column("job", Text),
    Column("body", LargeBinary, nullable=False),
    Column("previous", _DIGEST, nullable=False),
    Column("digest", _DIGEST, nullable=False),
    Index("ix_events_signature", "signature", "seq"),
    Index("ix_events_job", "job", "seq"),
    Index("ix_events_job_kind", "job", "kind", "seq"),
)
"""The audit log: every change of state, each event naming the digest of the one before."""

quarantine = Table(
    "quarantine",
    metadata,
    Column("signature", _DIGEST, primary_key=True),
    Column("revision", Integer, primary_key=True, autoincrement=False),
    Column("found_ns", BigInteger, nullable=False),
    Column("detail", Text, nullable=False),
)
"""Revisions whose bytes no longer are what their digest says; never served until an operator restored them."""

epochs = Table(
    "epochs",
    metadata,
    Column("epoch", _DIGEST, primary_key=True),
    Column("content", LargeBinary, nullable=False),
    Column("created_ns", BigInteger, nullable=False),
)
"""Epochs by id, canonical bytes."""

attempts = Table(
    "attempts",
    metadata,
    Column("job", Text, primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("key", Text, nullable=False),
    Column("request", LargeBinary, nullable=False),
    Column("epoch", _DIGEST, ForeignKey("epochs.epoch"), nullable=False),
    Column("opened_ns", BigInteger, nullable=False),
    Column("actor", Text, nullable=False),
    UniqueConstraint("job", "key", name="uq_attempts_job"),
    Index("ix_attempts_opened_ns", "job", "opened_ns", "attempt"),
)
"""Starts of jobs, numbered here; `request` is the leader's whole body, `key` its nonce."""

reports = Table(
    "reports",
    metadata,
    Column("job", Text, primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("slot", Text, primary_key=True),
    Column("ordinal", Integer, primary_key=True, autoincrement=False),
    Column("report", LargeBinary, nullable=False),
    Column("received_ns", BigInteger, nullable=False),
)
"""What ranks reported, canonical bytes; the first report under a name stays."""

job_signatures = Table(
    "job_signatures",
    metadata,
    Column("job", Text, primary_key=True),
    Column("signature", _DIGEST, primary_key=True),
)
"""Signatures that a job has reported: those whose activations enter its next epoch."""

tokens = Table(
    "tokens",
    metadata,
    Column("name", Text, primary_key=True),
    Column("hash", _DIGEST, nullable=False),
    Column("role", Text, nullable=False),
    Column("namespace", Text),
    Column("created_ns", BigInteger, nullable=False),
    Column("expires_ns", BigInteger),
    Column("revoked_ns", BigInteger),
    UniqueConstraint("hash", name="uq_tokens_hash"),
)
"""Who may call: the SHA-256 of each secret, its role, and the namespace that its jobs are in (none: all)."""

hardware_profiles = Table(
    "hardware_profiles",
    metadata,
    Column("name", Text, primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("digest", _DIGEST, nullable=False),
    Column("profile", LargeBinary, nullable=False),
    Column("created_ns", BigInteger, nullable=False),
    Column("actor", Text, nullable=False),
    Column("reason", Text, nullable=False),
)
"""Measured hardware profiles, canonical bytes; each content that was stored under a name is another version."""
