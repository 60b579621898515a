"""``python -m bucketplan_server``: the same as the command ``bucketplan-server``."""

if __name__ == "__main__":
    from bucketplan_server.cli import main

    main()
