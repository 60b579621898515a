"""The command line `bucketplan`: what people ask the planning service, over HTTP only."""

from bucketplan_core.program import run_program

__all__ = ["start"]


def start() -> None:
    """Entry point of the console script; needs the extra `client`, and says so."""
    run_program("bucketplan", "bucketplan_client.cli.main", extra="client")
