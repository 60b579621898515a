"""What the client reads from its environment; every variable is in the README."""

from __future__ import annotations

import os

__all__ = ["DISABLE_VARIABLE", "disabled_by_environment", "job_from_environment"]

DISABLE_VARIABLE = "BUCKETPLAN_DISABLE"
_OFF = frozenset({"", "0", "false", "no", "off"})
_JOB_VARIABLES = ("BUCKETPLAN_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_NAME")
_NAMELESS = frozenset({"", "none"})


def disabled_by_environment() -> bool:
    """Whether ``BUCKETPLAN_DISABLE`` asks for no bucketing at all."""
    return os.environ.get(DISABLE_VARIABLE, "").strip().lower() not in _OFF


def job_from_environment() -> str:
    """The job's name: ``BUCKETPLAN_JOB``, else what torchrun (``--rdzv-id``) or Slurm call it, else ``job``.

    Attempts of one job share their plans' history by this name, so it should stay the same over restarts.
    """
    for variable in _JOB_VARIABLES:
        value = os.environ.get(variable, "").strip()
        if value.lower() not in _NAMELESS:
            return value
    return "job"
