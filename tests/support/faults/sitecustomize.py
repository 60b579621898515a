"""Faults for server tests: Python imports this by name in every process whose PYTHONPATH holds this folder.

`TEST_PLANNING_SECONDS` makes planning take that much longer, in the planning process as in life.
`TEST_NO_PICKLE` makes it an error to unpickle, and to pickle by the means of multiprocessing, also through libraries.
"""

import os
import time

if os.environ.get("TEST_NO_PICKLE"):
    import _pickle
    import pickle

    class _Forbidden:
        def __init__(self, *arguments, **options):
            raise RuntimeError("pickle is used")

    def _forbidden(*arguments, **options):
        raise RuntimeError("pickle is used")

    for _module in (pickle, _pickle):
        for _name in ("Pickler", "Unpickler", "_Pickler", "_Unpickler"):
            setattr(_module, _name, _Forbidden)
        # Not `dumps`: Jinja2 makes a constant with it when it is imported.
        for _name in ("load", "loads", "_load", "_loads"):
            setattr(_module, _name, _forbidden)

_seconds = float(os.environ.get("TEST_PLANNING_SECONDS", "0"))

if _seconds:
    from bucketplan_core import planning

    _make_plan = planning.make_plan

    def _slow_plan(*arguments, **options):
        time.sleep(_seconds)
        return _make_plan(*arguments, **options)

    planning.make_plan = _slow_plan
