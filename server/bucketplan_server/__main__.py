"""``python -m bucketplan_server``: the same as the command ``bucketplan-server``."""

from bucketplan_server.cli import main

if __name__ == "__main__":
    main()
