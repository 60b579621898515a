"""`bucketplan calibrate`: measure the collectives of a live group, fit a hardware profile, and say how well it
predicts.
"""

from __future__ import annotations

from bucketplan_client.calibrate.fit import FittedOp, Sample, fit_collective
from bucketplan_client.calibrate.job import CalibrationPlan, calibrate

__all__ = ["CalibrationPlan", "FittedOp", "Sample", "calibrate", "fit_collective"]
