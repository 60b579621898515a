"""Faults for server tests: Python imports this by name in every process whose PYTHONPATH holds this folder.

`TEST_PLANNING_SECONDS` makes planning take that much longer, in the planning process as in life.
"""

import os
import time

_seconds = float(os.environ.get("TEST_PLANNING_SECONDS", "0"))

if _seconds:
    from bucketplan_core import planning

    _make_plan = planning.make_plan

    def _slow_plan(*arguments, **options):
        time.sleep(_seconds)
        return _make_plan(*arguments, **options)

    planning.make_plan = _slow_plan
