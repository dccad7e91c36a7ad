"""Metric definitions and their collection for Prometheus. docs/reference/metrics.md documents each metric."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from timebell.feature import Feature
from timebell.observe.counters import Counters, Histogram, LabeledCounter
from timebell.store.cluster.gauges import Gauges


class MetricDefinition(NamedTuple):
    """Kind, labels and help text of a metric."""

    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


METRICS: dict[str, MetricDefinition] = {
    "timebell_fires_total": MetricDefinition(
        "counter", ("topic", "outcome"), "Outcomes of starts: ok, failed (will be retried), dead (failed permanently)."
    ),
    "timebell_fires_not_run_total": MetricDefinition(
        "counter", ("reason",), "Occurrences this node skipped, by reason."
    ),
    "timebell_attempts_total": MetricDefinition(
        "counter",
        ("topic", "outcome"),
        "Finished attempts by outcome: ok, failed, timeout, lost, cancelled, postponed, dispatched.",
    ),
    "timebell_fire_lag_seconds": MetricDefinition(
        "histogram", (), "Seconds from due time to the first line of the handler, first attempts only."
    ),
    "timebell_tolerance_breaches_total": MetricDefinition(
        "counter", (), "First attempts that started later than the tolerance of their schedule."
    ),
    "timebell_run_duration_seconds": MetricDefinition("histogram", ("topic",), "Duration of attempts in seconds."),
    "timebell_run_timeout_ratio": MetricDefinition(
        "histogram", ("topic",), "Duration of attempts as a fraction of their timeout."
    ),
    "timebell_deliveries_total": MetricDefinition(
        "counter",
        ("target_kind", "code_class"),
        "Deliveries to targets: ok, error, timeout, stopped; for HTTP 2xx to 5xx.",
    ),
    "timebell_delivery_duration_seconds": MetricDefinition(
        "histogram", ("target_kind",), "Duration of deliveries in seconds."
    ),
    "timebell_gate_verdicts_total": MetricDefinition(
        "counter",
        ("verdict",),
        "Pre-delivery checks by verdict: passed, condition, quota, orphaned, paused, withdrawn, waits.",
    ),
    "timebell_auth_failures_total": MetricDefinition(
        "counter",
        ("reason",),
        "Failed authentications: missing_key, wrong_key, unusable_key (revoked, expired or from another network),"
        " wrong_signature (webhooks), wrong_password, wrong_code (of the second step), wrong_token (of an identity"
        " provider), refused_identity (without a role, or disabled), throttled (too many failed sign-ins).",
    ),
    "timebell_forwarded_headers_ignored_total": MetricDefinition(
        "counter", (), "Requests with X-Forwarded-For or Forwarded from a peer that is not a trusted proxy."
    ),
    "timebell_due_found": MetricDefinition("histogram", (), "Due jobs per claim, for claims that returned any."),
    "timebell_claim_conflicts_total": MetricDefinition("counter", (), "Claims that found the due jobs already taken."),
    "timebell_missed_total": MetricDefinition(
        "counter", ("reason",), "Occurrences missed: policy (skipped), unrecorded (overdue or lost, without a row)."
    ),
    "timebell_double_fires_total": MetricDefinition("counter", (), "Occurrences that ran as two jobs. Always 0."),
    "timebell_audit_differences_total": MetricDefinition(
        "counter", ("finding",), "Differences found by the leader's audit. Always 0."
    ),
    "timebell_history_rewound_total": MetricDefinition(
        "counter",
        ("kind",),
        "Writes of this process that a failover or a restore lost: jobs, results, cancels, schedules. Always 0.",
    ),
    "timebell_leader": MetricDefinition("gauge", (), "1 if this node is the leader."),
    "timebell_leader_changes_total": MetricDefinition("counter", (), "Number of times this node became leader."),
    "timebell_node_clock_skew_seconds": MetricDefinition(
        "gauge", (), "Seconds by which this machine's clock is ahead of the database clock."
    ),
    "timebell_node_slots": MetricDefinition("gauge", ("state",), "Slots for attempts on this node: busy, free."),
    "timebell_db_duration_seconds": MetricDefinition(
        "histogram", ("op",), "Duration of store operations in seconds, including waiting."
    ),
    "timebell_build_info": MetricDefinition("gauge", ("version", "tzdata"), "Always 1."),
    "timebell_database_up": MetricDefinition(
        "gauge", (), "1 if the database responded; otherwise the following metrics are omitted."
    ),
    "timebell_jobs": MetricDefinition("gauge", ("state",), "Live jobs: pending, running, held."),
    "timebell_queue_depth": MetricDefinition(
        "gauge", ("queue",), "Due jobs waiting to start, by queue; paused queues are omitted."
    ),
    "timebell_oldest_due_age_seconds": MetricDefinition(
        "gauge", (), "Seconds since the oldest waiting job became due."
    ),
    "timebell_unhandled_jobs": MetricDefinition("gauge", (), "Due jobs held because no live node handles their topic."),
    "timebell_dead_letters": MetricDefinition(
        "gauge", (), "Permanently failed jobs that were neither retried nor discarded."
    ),
    "timebell_dead_letters_last_hour": MetricDefinition(
        "gauge", (), "Jobs that failed permanently within an hour and were neither retried nor discarded."
    ),
    "timebell_missed_last_hour": MetricDefinition(
        "gauge", (), "Occurrences of all nodes that were missed or expired within an hour."
    ),
    "timebell_targets_disabled": MetricDefinition(
        "gauge", (), "Targets disabled because their receiver is gone (410); their jobs fail."
    ),
    "timebell_audit_export_failing_seconds": MetricDefinition(
        "gauge",
        ("destination",),
        "Seconds for which deliveries of the audit log to webhook or syslog have been failing; 0 after a delivery.",
    ),
    "timebell_schedules": MetricDefinition("gauge", ("state",), "Schedules: active, paused, errored."),
    "timebell_evaluation_lag_seconds": MetricDefinition(
        "gauge", (), "Seconds that the first due schedule has been waiting to be planned."
    ),
    "timebell_schedule_overdue": MetricDefinition(
        "gauge", ("schedule",), "Schedules that should have fired but did not. The label is opt-in."
    ),
    "timebell_schedule_last_success_timestamp_seconds": MetricDefinition(
        "gauge", ("schedule",), "Time of the last success of a schedule. Opt-in."
    ),
}


def collect_definitions(features: Iterable[Feature]) -> dict[str, MetricDefinition]:
    """Return the definitions of all metrics, with those of features."""
    return METRICS | {name: each for feature in features for name, each in feature.metrics().items()}


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Current state of a node, in addition to its counters."""

    version: str
    tzdata: str
    is_leader: bool
    clock_skew_seconds: float
    busy_slots: int
    free_slots: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Data of one scrape, a collector of prometheus-client. `gauges` is None if the database did not respond."""

    counters: Counters
    node: NodeFacts
    gauges: Gauges | None
    labeled: bool
    features: Sequence[Feature]

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        yield from self._counter_families()
        yield from self._histogram_families()
        yield from self._node_families()
        yield _gauge("timebell_database_up", self.gauges is not None)
        if self.gauges is not None:
            yield from self._database_families(self.gauges)
        yield from self._feature_families()

    def _feature_families(self) -> Iterator[Metric]:
        gauges = {} if self.gauges is None else self.gauges.of_features
        for feature in self.features:
            for name, (kind, label_names, help_text) in feature.metrics().items():
                values = self.counters.of_features[name].values if kind == "counter" else gauges.get(name)
                if values is not None:
                    new_family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                    family = new_family(name, help_text, labels=label_names)
                    for labels, value in list(values.items()):
                        family.add_metric(labels, value)
                    yield family

    def _counter_families(self) -> Iterator[Metric]:
        counters = self.counters
        yield _labeled_counter("timebell_fires_total", counters.fires)
        yield _labeled_counter("timebell_fires_not_run_total", counters.not_run)
        yield _labeled_counter("timebell_attempts_total", counters.attempts)
        yield _labeled_counter("timebell_deliveries_total", counters.deliveries)
        yield _labeled_counter("timebell_missed_total", counters.missed)
        yield _labeled_counter("timebell_gate_verdicts_total", counters.delivery_check_verdicts)
        yield _labeled_counter("timebell_auth_failures_total", counters.authentication_failures)
        yield _counter("timebell_forwarded_headers_ignored_total", counters.forwarded_headers_ignored)
        yield _counter("timebell_tolerance_breaches_total", counters.tolerance_breaches)
        yield _counter("timebell_claim_conflicts_total", counters.claim_conflicts)
        yield _counter("timebell_double_fires_total", counters.duplicate_fires)
        yield _labeled_counter("timebell_audit_differences_total", counters.audit_differences)
        yield _labeled_counter("timebell_history_rewound_total", counters.history_rewound)
        yield _counter("timebell_leader_changes_total", counters.leader_changes)

    def _histogram_families(self) -> Iterator[Metric]:
        counters = self.counters
        yield _histogram("timebell_fire_lag_seconds", counters.lag)
        yield _histogram("timebell_run_duration_seconds", counters.run_durations)
        yield _histogram("timebell_run_timeout_ratio", counters.timeout_ratios)
        yield _histogram("timebell_delivery_duration_seconds", counters.delivery_durations)
        yield _histogram("timebell_due_found", counters.claim_sizes)
        yield _histogram("timebell_db_duration_seconds", counters.database_durations)

    def _node_families(self) -> Iterator[Metric]:
        node = self.node
        yield _gauge("timebell_leader", node.is_leader)
        yield _gauge("timebell_node_clock_skew_seconds", node.clock_skew_seconds)
        yield _gauges("timebell_node_slots", [(("busy",), node.busy_slots), (("free",), node.free_slots)])
        yield _gauges("timebell_build_info", [((node.version, node.tzdata), 1)])

    def _database_families(self, gauges: Gauges) -> Iterator[Metric]:
        yield _gauges("timebell_jobs", _label_values(gauges.jobs.items()))
        yield _gauges("timebell_schedules", _label_values(gauges.schedules.items()))
        yield _gauges("timebell_queue_depth", _label_values(gauges.depths.items()))
        yield _gauge("timebell_oldest_due_age_seconds", gauges.oldest_due_age)
        yield _gauge("timebell_evaluation_lag_seconds", gauges.evaluation_lag)
        yield _gauge("timebell_unhandled_jobs", gauges.unhandled)
        yield _gauge("timebell_dead_letters", gauges.dead_letters)
        yield _gauge("timebell_dead_letters_last_hour", gauges.failed_last_hour)
        yield _gauge("timebell_missed_last_hour", gauges.missed_last_hour)
        yield _gauge("timebell_targets_disabled", gauges.disabled_targets)
        failures = _label_values(gauges.audit_export_failures.items())
        yield _gauges("timebell_audit_export_failing_seconds", failures)
        if not self.labeled:
            yield _gauge("timebell_schedule_overdue", len(gauges.overdue))
            return
        yield _gauges("timebell_schedule_overdue", _label_values((schedule.label, 1) for schedule in gauges.overdue))
        successes = ((schedule, at.timestamp()) for schedule, at in gauges.successes.items())
        yield _gauges("timebell_schedule_last_success_timestamp_seconds", _label_values(successes))


def _label_values(values: Iterable[tuple[str, float]]) -> list[tuple[tuple[str, ...], float]]:
    return [((label,), value) for label, value in values]


def _counter(name: str, value: float) -> Metric:
    return CounterMetricFamily(name, METRICS[name].help, value)


def _gauge(name: str, value: float) -> Metric:
    return GaugeMetricFamily(name, METRICS[name].help, value)


def _gauges(name: str, values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(name, METRICS[name].help, labels=METRICS[name].labels)
    for labels, value in values:
        family.add_metric(labels, value)
    return family


def _labeled_counter(name: str, counter: LabeledCounter) -> Metric:
    family = CounterMetricFamily(name, METRICS[name].help, labels=METRICS[name].labels)
    for labels, value in list(counter.values.items()):
        family.add_metric(labels, value)
    return family


def _histogram(name: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(name, METRICS[name].help, labels=METRICS[name].labels)
    bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
    for labels, series in list(histogram.series.items()):
        buckets = list(zip(bounds, accumulate(series.buckets), strict=True))
        family.add_metric(labels, buckets, series.total)
    return family
