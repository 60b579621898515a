"""Prometheus metrics, named by convention. The hot path only adds to plain integers, read when somebody scrapes."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bucketplan_server import __version__

__all__ = ["CONTENT_TYPE_LATEST", "METRICS", "Metrics"]

METRICS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "bucketplan_http_responses_total": ("counter", ("status",), "answers by HTTP status"),
    "bucketplan_plan_hits_total": ("counter", ("source",), "plans answered from memory or from the store"),
    "bucketplan_plan_misses_total": ("counter", (), "reads of a plan that is not stored"),
    "bucketplan_plannings_total": ("counter", ("outcome",), "plannings that ended: stored, known, refused or failed"),
    "bucketplan_plannings_in_progress": ("gauge", (), "signatures in planning now"),
    "bucketplan_single_flight_waits_total": (
        "counter",
        (),
        "posts that waited for a planning that was already running",
    ),
    "bucketplan_body_bytes": ("gauge", (), "bytes of bodies that calls hold now"),
    "bucketplan_waiters": ("gauge", (), "calls waiting for planning now"),
    "bucketplan_post_waiters": ("gauge", (), "readers waiting for somebody to post a plan now"),
    "bucketplan_status_waiters": ("gauge", (), "calls waiting for an attempt to change now"),
    "bucketplan_planner_crashes_total": ("counter", (), "planning processes that died"),
    "bucketplan_store_errors_total": (
        "counter",
        (),
        "transactions that failed, rows that cannot be read, and failures of what a server repeats",
    ),
    "bucketplan_attempts_opened_total": ("counter", (), "job attempts that were opened"),
    "bucketplan_reports_total": ("counter", (), "reports of ranks that were new"),
    "bucketplan_divergences_total": ("counter", (), "reports that contradict another rank of their group"),
    "bucketplan_quarantined_total": ("counter", (), "damaged plans found since the start"),
    "bucketplan_access_refused_total": (
        "counter",
        ("reason",),
        "calls refused: no-token, unknown-token, expired-token, revoked-token, role, namespace, cross-site, host",
    ),
    "bucketplan_memory_plans": ("gauge", (), "plans held in memory"),
    "bucketplan_memory_bytes": ("gauge", (), "bytes of plans held in memory"),
    "bucketplan_ready": ("gauge", (), "1 while the server takes new connections, 0 from the stop signal on"),
    "bucketplan_build_info": ("gauge", ("version",), "always 1; the label is the release"),
}
"""Metrics read at scrape time: kind, labels, meaning. `bucketplan_planning_seconds` is a histogram beside them."""


class Metrics(Collector):
    """Counters of this process. `gauges` are read by calling; counters with labels count in `tallies`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.planning_seconds = Histogram(
            "bucketplan_planning_seconds",
            "time from the start of a planning to the stored plan",
            registry=self.registry,
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
        )
        self.statuses: Tally[int] = Tally()
        self.tallies: Tally[tuple[str, str]] = Tally()
        self._readers: dict[str, Callable[[], float]] = {}
        self.registry.register(self)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)

    def count(self, name: str, label: str = "") -> None:
        """Add one to a counter; `label` is the value of its only label."""
        self.tallies[name, label] += 1

    def read_from(self, name: str, read: Callable[[], float]) -> None:
        """Take a metric's value from `read` at scrape time."""
        self._readers[name] = read

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        for name, (kind, labels, meaning) in METRICS.items():
            family: CounterMetricFamily | GaugeMetricFamily
            if kind == "counter":
                family = CounterMetricFamily(name.removesuffix("_total"), meaning, labels=labels)
            else:
                family = GaugeMetricFamily(name, meaning, labels=labels)
            for values, value in self._samples(name, labels):
                family.add_metric(values, value)
            yield family

    def _samples(self, name: str, labels: tuple[str, ...]) -> list[tuple[list[str], float]]:
        if name == "bucketplan_build_info":
            return [([__version__], 1.0)]
        if name == "bucketplan_http_responses_total":
            return [([str(status)], float(number)) for status, number in sorted(self.statuses.items())]
        if name in self._readers:
            return [([], self._readers[name]())]
        counted = [
            ([label] if labels else [], float(number))
            for (counter, label), number in sorted(self.tallies.items())
            if counter == name
        ]
        return counted or ([] if labels else [([], 0.0)])
