"""The epoch: what a job attempt was promised when it opened, as one immutable record whose id is its content hash.

It holds everything that can change a plan of this job and nothing else, so that what an operator does for another job
changes no id and cools no compile cache: completed options (with planner version and hardware figures), the topology
that the leader stated, the capture version, and the overrides (signatures whose plan is not the planner's own).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from bucketplan_core.collectives import Options
from bucketplan_core.errors import DecodeError
from bucketplan_core.fields import Fields
from bucketplan_core.request import CAPTURE_VERSION
from bucketplan_core.wire import WireValue, digest_of, pack, unpack

__all__ = ["EPOCH_SCHEMA", "MAX_NODES", "Epoch", "Override", "complete_options"]

EPOCH_SCHEMA = 1
MAX_NODES = 1_000_000
"""Most hosts that a role may span; more is a mistake."""
_MAX_ROLES = 1_000
_MAX_OVERRIDES = 10_000


@dataclass(frozen=True, slots=True, order=True)
class Override:
    """A signature whose plan under an epoch is the revision with this decision digest, not the planner's own."""

    signature: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What one attempt of `job` sees to its end, whatever an operator does meanwhile.

    `options` are complete: ranks use them as they are. `topology` maps each group role to the number of hosts it spans,
    one value a role for the whole job, sorted by role. `overrides` are sorted by signature, each signature once.
    """

    job: str
    options: Options
    topology: tuple[tuple[str, int], ...] = ()
    overrides: tuple[Override, ...] = ()
    capture: int = CAPTURE_VERSION

    @classmethod
    def build(
        cls,
        *,
        job: str,
        options: Options,
        topology: Mapping[str, int],
        overrides: Mapping[str, str],
        capture: int = CAPTURE_VERSION,
    ) -> Epoch:
        """The one epoch of these parts, whatever order they arrive in; raises `DecodeError` as `decode` does.

        `overrides` maps signatures to decision digests.
        """
        epoch = cls(
            job=job,
            options=options,
            topology=tuple(sorted(topology.items())),
            overrides=tuple(Override(signature, overrides[signature]) for signature in sorted(overrides)),
            capture=capture,
        )
        return cls.from_wire(epoch.to_wire())

    @cached_property
    def encoded(self) -> bytes:
        """The canonical bytes that `id` hashes."""
        return pack(self.to_wire())

    @cached_property
    def id(self) -> str:
        """SHA-256 of `encoded`: what ranks compare, and what the header `Bucketplan-Epoch` names."""
        return digest_of(self.encoded)

    def digest_for(self, signature: str) -> str | None:
        """The decision digest that this epoch fixes for `signature`; None where the planner's own plan holds."""
        return self._by_signature.get(signature)

    @cached_property
    def _by_signature(self) -> dict[str, str]:
        return {override.signature: override.digest for override in self.overrides}

    def to_wire(self) -> dict[str, WireValue]:
        return {
            "capture": self.capture,
            "job": self.job,
            "options": self.options.to_wire(),
            "overrides": {
                "digest": [override.digest for override in self.overrides],
                "signature": [override.signature for override in self.overrides],
            },
            "schema": EPOCH_SCHEMA,
            "topology": dict(self.topology),
        }

    @classmethod
    def decode(cls, data: bytes) -> Epoch:
        """Read canonical bytes; raises `DecodeError` with the field's path."""
        epoch = cls.from_wire(unpack(data))
        epoch.__dict__["encoded"] = data
        return epoch

    @classmethod
    def from_wire(cls, tree: WireValue, path: str = "epoch") -> Epoch:
        """Read a decoded tree; raises `DecodeError` with the field's path below `path`."""
        return cls.read(Fields(tree, path))

    @classmethod
    def read(cls, fields: Fields) -> Epoch:
        """Read a map whose fields nobody else reads; raises `DecodeError`."""
        fields.schema((EPOCH_SCHEMA,))
        epoch = cls(
            job=fields.name("job"),
            options=Options.read(fields.submap("options")),
            topology=read_topology(fields.submap("topology")),
            overrides=_read_overrides(fields.submap("overrides")),
            capture=fields.integer("capture", low=1),
        )
        fields.finish()
        return epoch

    def __repr__(self) -> str:
        return f"Epoch({self.id[:12]}, job {self.job!r}, {self.options.planner}, {len(self.overrides)} overrides)"


def read_topology(fields: Fields) -> tuple[tuple[str, int], ...]:
    """Hosts that each role spans, sorted by role; raises `DecodeError`."""
    roles = fields.keys(limit=_MAX_ROLES)
    return tuple((role, fields.integer(role, low=0, high=MAX_NODES)) for role in roles)


def _read_overrides(fields: Fields) -> tuple[Override, ...]:
    signatures = _digests(fields, "signature")
    digests = _digests(fields, "digest")
    fields.finish()
    if len(signatures) != len(digests):
        raise DecodeError(f"{fields.path}.digest", f"{len(digests)} entries", "must have one entry a signature")
    for index, (before, after) in enumerate(pairwise(signatures)):
        if after <= before:
            raise DecodeError(f"{fields.path}.signature[{index + 1}]", after, "must be sorted, each signature once")
    return tuple(Override(signature, digest) for signature, digest in zip(signatures, digests, strict=True))


def _digests(fields: Fields, key: str) -> Sequence[str]:
    values = fields.array(key, limit=_MAX_OVERRIDES)
    return [
        Fields({"digest": value}, f"{fields.path}.{key}[{index}]").digest("digest")
        for index, value in enumerate(values)
    ]


def complete_options(given: Mapping[str, WireValue], defaults: Options, *, path: str = "options") -> Options:
    """`defaults` with what a user said put over them: the options that every rank of an attempt adopts.

    Where the user names a strategy but no planner version, it is the newest that this build holds. Raises `DecodeError`
    for an unknown or bad field, `PlannerUnavailable` for a strategy without a planner.
    """
    tree = {**defaults.to_wire(), **given}
    if "strategy" in given and "planner" not in given and given["strategy"] != defaults.strategy:
        from bucketplan_core.planners import current_version  # the planners are the heavy part of core

        # Read with the default strategy first, so that a bad value is refused by its own name.
        asked = Options.read(Fields({**tree, "planner": f"{given['strategy']!s}/0"}, path))
        return replace(asked, planner=current_version(asked.strategy))
    return Options.read(Fields(tree, path))
