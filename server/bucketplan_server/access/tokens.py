"""Tokens in memory: who holds which, found by one lookup of the token's hash.

A token is 256 random bits. Its SHA-256 is what is stored: there is no dictionary to try against it, so a slow password
hash would protect nothing and cost every call of every rank milliseconds.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass

from bucketplan_server.access.principal import Principal, Role

__all__ = ["TOKEN_PREFIX", "Token", "TokenTable", "bearer", "hash_token", "new_token"]

TOKEN_PREFIX = "bpt_"
"""So that people and secret scanners recognise one."""
_RANDOM_BYTES = 32
_BEARER = b"bearer "
_MOST_SEEN = 1_024
"""Headers remembered: one token can be sent in many spellings, and a fleet has few tokens."""


def new_token() -> str:
    """A new secret."""
    return TOKEN_PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def hash_token(secret: bytes) -> bytes:
    """What is stored and compared of a token."""
    return hashlib.sha256(secret).digest()


def bearer(authorization: bytes) -> bytes:
    """The secret in an Authorization header, empty for another scheme."""
    return authorization[7:].strip() if authorization[:7].lower() == _BEARER else b""


@dataclass(frozen=True, slots=True)
class Token:
    """One token without its secret. Times are nanoseconds since 1970; None: never."""

    name: str
    hash: bytes
    role: Role
    namespace: str | None
    created_ns: int
    expires_ns: int | None
    revoked_ns: int | None
    damage: str | None = None
    """Why the stored row is not that of a token, which nobody holds then; `hash` is empty."""

    @property
    def principal(self) -> Principal:
        return Principal(self.name, self.role, self.namespace)

    def state(self, now_ns: int) -> str:
        """``valid``, ``expired``, ``revoked`` or ``damaged``."""
        if self.damage is not None:
            return "damaged"
        if self.revoked_ns is not None:
            return "revoked"
        return "expired" if self.expires_ns is not None and now_ns >= self.expires_ns else "valid"


class TokenTable:
    """Every token by its hash, revoked and expired ones too, so that a refusal can name them."""

    __slots__ = ("_by_hash", "_namespaces", "_seen", "_seen_namespaces", "required")

    def __init__(self, *, required: bool) -> None:
        self.required = required
        self._by_hash: dict[bytes, tuple[Token, Principal, int]] = {}
        self._namespaces: dict[str, str | None] = {}
        self._seen: dict[bytes, int] = {}
        self._seen_namespaces: dict[bytes, str | None] = {}

    def __len__(self) -> int:
        return len(self._by_hash)

    def replace(self, tokens: Iterable[Token]) -> None:
        """Hold these from now on. The first token there ever was closes the server to callers without one, for good."""
        ends_never = 2**63
        tokens = list(tokens)
        self._namespaces = {token.name: token.namespace for token in tokens}
        self._by_hash = {
            token.hash: (
                token,
                token.principal,
                0 if token.revoked_ns is not None else ends_never if token.expires_ns is None else token.expires_ns,
            )
            for token in tokens
            if token.damage is None
        }
        self._seen.clear()
        self._seen_namespaces.clear()
        self.required = self.required or bool(tokens)

    def admits(self, authorization: bytes) -> bool:
        """Whether an Authorization header holds a token that is valid now, remembered until the tokens change.

        Hashing it and comparing in constant time took a tenth of serving a known plan. The memory finds a header by
        Python's hash of it, keyed anew in every process, and compares bytes only where all 64 bits of that agree: no
        guess comes near enough to a token for the time to tell anything.
        """
        ends_ns = self._seen.get(authorization)
        if ends_ns is None:
            found = self._held(bearer(authorization))
            if found is None:
                return False
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
                self._seen_namespaces.clear()
            self._seen_namespaces[authorization] = found[1].namespace
            ends_ns = self._seen[authorization] = found[2]
        return time.time_ns() < ends_ns

    def namespace_admitted(self, authorization: bytes) -> str | None:
        """The namespace of the token in a header that `admits` has just let in."""
        return self._seen_namespaces[authorization]

    def valid(self, secret: bytes) -> Principal | None:
        """Who holds this token, None unless it is valid now.

        Found by the hash, which nobody can steer towards a stored one byte by byte, then compared in constant time.
        """
        found = self._held(secret)
        return None if found is None or time.time_ns() >= found[2] else found[1]

    def _held(self, secret: bytes) -> tuple[Token, Principal, int] | None:
        hashed = hash_token(secret)
        found = self._by_hash.get(hashed)
        return found if found is not None and hmac.compare_digest(found[0].hash, hashed) else None

    def namespace_of(self, name: str) -> str | None:
        """The namespace of the token of this name, valid or not; None for one without and for no token. Names are
        never used again, so this also holds of what a token did long ago."""
        return self._namespaces.get(name)

    def known(self, secret: bytes) -> Token | None:
        """The token of this secret, valid or not."""
        found = self._held(secret)
        return None if found is None else found[0]
