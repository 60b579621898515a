"""``python -m bucketplan_server.planner``: a planning process; servers start it, nobody else."""

import signal
import sys

if __name__ == "__main__":
    # The terminal's interrupt goes to the whole group, from the first moment; the server decides when planners end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from bucketplan_server.planner.process import main

    main(sys.argv[1:])
