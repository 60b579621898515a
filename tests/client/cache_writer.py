"""A process that writes into a plan cache until it is killed: ``python -m tests.client.cache_writer FOLDER START``."""

import sys
from pathlib import Path

from bucketplan_client.cache import PlanCache
from bucketplan_core import make_plan
from tests.client.requests import small_epoch, small_request


def main() -> None:
    cache = PlanCache(Path(sys.argv[1]), max_bytes=60_000)
    epoch = small_epoch()
    print("ready", flush=True)
    number = int(sys.argv[2])
    while True:
        cache.keep(make_plan(small_request(num_params=2 + number % 7)), epoch)
        cache.keep_epoch(epoch)
        number += 1


if __name__ == "__main__":
    main()
