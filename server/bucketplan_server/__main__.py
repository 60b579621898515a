"""``python -m bucketplan_server``: the same as the command ``bucketplan-server``."""

from bucketplan_core.program import run_program

__all__ = ["start"]


def start() -> None:
    """Entry point of the console script; needs the extra `server`, and says so."""
    run_program("bucketplan-server", "bucketplan_server.cli", extra="server")


if __name__ == "__main__":
    start()
