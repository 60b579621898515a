"""Capture: from a live fx graph to a description of its collectives, without changing it."""
