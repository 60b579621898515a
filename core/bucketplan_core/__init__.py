"""Data model, legality, cost and planners of bucketplan; needs neither torch nor a web framework."""
