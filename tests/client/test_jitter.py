"""The client spreads its load without touching the random numbers of the job that it runs in."""

import random

from bucketplan_client.jitter import uniform


class TestJitter:
    def test_lies_between_its_bounds(self):
        assert all(2.0 <= uniform(2.0, 3.0) <= 3.0 for _ in range(100))

    def test_leaves_the_job_s_generator_alone(self):
        random.seed(7)
        before = random.getstate()
        uniform(0.0, 1.0)
        assert random.getstate() == before

    def test_nothing_in_the_client_draws_from_the_global_generator(self):
        from pathlib import Path

        import bucketplan_client

        folder = Path(bucketplan_client.__file__).parent
        drawing = [
            path.name
            for path in folder.rglob("*.py")
            if path.name != "jitter.py" and ("import random" in path.read_text() or "wait_random" in path.read_text())
        ]
        assert drawing == []
