"""What the client reads from its environment; every variable is in the README."""

from __future__ import annotations

import os
import re
from pathlib import Path

from bucketplan_client.arguments import BadArgument, is_unicode
from bucketplan_client.errors import BadToken
from bucketplan_client.files import read_small_file

__all__ = [
    "DISABLE_VARIABLE",
    "disabled_by_environment",
    "job_from_environment",
    "split_secrets",
    "token_from_environment",
]

DISABLE_VARIABLE = "BUCKETPLAN_DISABLE"
_OFF = frozenset({"", "0", "false", "no", "off"})
_JOB_VARIABLES = ("BUCKETPLAN_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_NAME")
_NAMELESS = frozenset({"", "none"})
_MAX_TOKEN_BYTES = 64 * 2**10
"""More than any server takes as a header."""


def disabled_by_environment() -> bool:
    """Whether ``BUCKETPLAN_DISABLE`` asks for no bucketing at all."""
    return os.environ.get(DISABLE_VARIABLE, "").strip().lower() not in _OFF


def job_from_environment() -> str:
    """The job's name: ``BUCKETPLAN_JOB``, else what torchrun (``--rdzv-id``) or Slurm call it, else ``job``.

    Attempts of one job share their plans' history by this name, so it should stay the same over restarts. Raises
    `BadArgument`, naming the variable, for a name that no URL can hold.
    """
    for variable in _JOB_VARIABLES:
        value = os.environ.get(variable, "").strip()
        if value.lower() in _NAMELESS:
            continue
        if value in (".", "..") or not is_unicode(value):
            raise BadArgument(variable, value, "a job's name of letters, digits and ._:-, other than . and ..")
        return value
    return "job"


def token_from_environment() -> str | None:
    """The bearer token: ``BUCKETPLAN_TOKEN``, else the content of the file that ``BUCKETPLAN_TOKEN_FILE`` names.

    Raises `BadToken` for a file that cannot be read, is empty, or is no regular file of 64 KiB at most.
    """
    token = os.environ.get("BUCKETPLAN_TOKEN", "").strip()
    path = os.environ.get("BUCKETPLAN_TOKEN_FILE", "")
    if token or not path:
        return token or None
    try:
        token = read_small_file(Path(path), most_bytes=_MAX_TOKEN_BYTES).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise BadToken(f"BUCKETPLAN_TOKEN_FILE {path} cannot be read: {reason}") from None
    if not token:
        raise BadToken(f"BUCKETPLAN_TOKEN_FILE {path} is empty")
    return token


def split_secrets(address: str) -> tuple[str, str]:
    """An address without the user and password in it, which errors and logs would show; and these."""
    found = re.match(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<secret>[^/?#]*)@", address)
    if found is None:
        return address, ""
    return found["scheme"] + address[found.end() :], found["secret"]
