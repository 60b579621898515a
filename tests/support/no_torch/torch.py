"""Stands before the real torch on PYTHONPATH: who imports it gets what a machine without torch gives."""

raise ModuleNotFoundError("No module named 'torch'", name="torch")
