"""``python -m bucketplan_server``: the same as the command ``bucketplan-server``."""

if __name__ == "__main__":
    # Planning processes import this module again under another name and need nothing of the command.
    from bucketplan_server.cli import main

    main()
