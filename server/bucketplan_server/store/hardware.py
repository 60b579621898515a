"""Measured hardware profiles in the store: by name, each content another version, none ever changed or deleted."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import RowMapping, func, insert, select

from bucketplan_core.presets import MeasuredProfile
from bucketplan_core.wire import digest_of, pack, unpack
from bucketplan_server.store.engine import Store
from bucketplan_server.store.events import Cause, append_event
from bucketplan_server.store.tables import hardware_profiles

__all__ = ["StoredProfile", "list_profiles", "load_profile", "store_profile"]


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """One version of a named profile; `digest` is SHA-256 over the canonical bytes of `profile`."""

    name: str
    version: int
    digest: str
    profile: MeasuredProfile
    created_ns: int
    actor: str
    reason: str


async def store_profile(store: Store, profile: MeasuredProfile, cause: Cause) -> tuple[StoredProfile, bool]:
    """Store `profile` as the next version of its name; the flag is false where the newest version is the same."""
    encoded = pack(profile.to_wire())
    digest = digest_of(encoded)
    now = time.time_ns()
    async with store.write() as connection:
        query = select(hardware_profiles).where(hardware_profiles.c.name == profile.name)
        newest = (await connection.execute(query.order_by(hardware_profiles.c.version.desc()).limit(1))).mappings()
        last = newest.first()
        if last is not None and last["digest"] == digest:
            return _stored(last), False
        version = 1 if last is None else last["version"] + 1
        await connection.execute(
            insert(hardware_profiles).values(
                name=profile.name,
                version=version,
                digest=digest,
                profile=encoded,
                created_ns=now,
                actor=cause.actor,
                reason=cause.reason,
            )
        )
        body = {"digest": digest, "name": profile.name, "version": version}
        await append_event(connection, "profile.stored", cause, at_ns=now, body=body)
    return StoredProfile(profile.name, version, digest, profile, now, cause.actor, cause.reason), True


async def load_profile(store: Store, name: str, version: int | None = None) -> StoredProfile | None:
    """The version of this number, the newest where None; None where there is none. Raises `StoreError`."""
    query = select(hardware_profiles).where(hardware_profiles.c.name == name)
    if version is not None:
        query = query.where(hardware_profiles.c.version == version)
    async with store.read() as connection:
        rows = (await connection.execute(query.order_by(hardware_profiles.c.version.desc()).limit(1))).mappings()
        row = rows.first()
    return None if row is None else _stored(row)


async def list_profiles(store: Store, *, name: str | None = None) -> list[StoredProfile]:
    """The newest version of every name, sorted; with `name` every version of it, the newest first."""
    if name is not None:
        query = select(hardware_profiles).where(hardware_profiles.c.name == name)
    else:
        newest = (
            select(hardware_profiles.c.name, func.max(hardware_profiles.c.version).label("version"))
            .group_by(hardware_profiles.c.name)
            .subquery()
        )
        query = select(hardware_profiles).join(
            newest,
            (newest.c.name == hardware_profiles.c.name) & (newest.c.version == hardware_profiles.c.version),
        )
    query = query.order_by(hardware_profiles.c.name, hardware_profiles.c.version.desc())
    async with store.read() as connection:
        return [_stored(row) for row in (await connection.execute(query)).mappings()]


def _stored(row: RowMapping) -> StoredProfile:
    return StoredProfile(
        name=row["name"],
        version=row["version"],
        digest=row["digest"],
        profile=MeasuredProfile.from_wire(unpack(row["profile"])),
        created_ns=row["created_ns"],
        actor=row["actor"],
        reason=row["reason"],
    )
