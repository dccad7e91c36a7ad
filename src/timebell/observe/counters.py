"""In-memory counters and histograms of a node. `metrics.py` exports them.

Cardinality is bounded: there are no labels for jobs or tenants, and once a metric has MAX_SERIES series, new topics are
counted as `other`. Not the counters of prometheus-client, because these are on the hot path and cost a tenth.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from timebell.feature import Feature
from timebell.model.audit_findings import Finding
from timebell.model.job import Completion, JobState, Reason
from timebell.store.recent_writes import KINDS

VERDICTS = ("passed", "condition", "quota", "orphaned", "paused", "withdrawn", "waits")
HANDLER_OK = "handler", "ok"
MAX_SERIES = 500  # series of one metric
OTHER = "other"
LAG_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0)
DURATION_BUCKETS = (0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)
RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.8, 0.9, 0.95, 1.0)
CLAIM_SIZE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 50.0, 100.0, 500.0)
DATABASE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)

AUTHENTICATION_FAILURES = (
    "missing_key", "wrong_key", "unusable_key", "wrong_signature", "wrong_password", "wrong_code", "wrong_token",
    "refused_identity", "throttled",
)  # fmt: skip


class LabeledCounter:
    """Counter by label values.

    The labels in `initial` start at 0, because `increase()` in Prometheus ignores the first sample of a new series.
    """

    def __init__(self, initial: Sequence[str] = ()) -> None:
        self.values: dict[tuple[str, ...], int] = {(label,): 0 for label in initial}

    def add(self, *labels: str, by: int = 1) -> None:
        """Increment the series of these labels."""
        try:
            self.values[labels] += by
        except KeyError:
            self.values[self.series_key(*labels)] += by

    def series_key(self, *labels: str) -> tuple[str, ...]:
        """Return the key of `values` for these labels, creating the series if necessary."""
        if labels not in self.values:
            if len(self.values) >= MAX_SERIES:
                labels = (OTHER, *labels[1:])
            self.values.setdefault(labels, 0)
        return labels


@dataclass(slots=True)
class Series:
    """Number of values in each bucket (the last one is unbounded), and the sum of all values."""

    buckets: list[int]
    total: float = 0.0


class Histogram:
    """Histogram by label values."""

    def __init__(self, bounds: Sequence[float], *, labeled: bool = True) -> None:
        self.bounds = bounds
        self._lowest_bound = bounds[0]
        self.series: dict[tuple[str, ...], Series] = {} if labeled else {(): self._new()}

    def get_series(self, *labels: str) -> Series:
        """Return the series of these labels, creating it if necessary."""
        try:
            return self.series[labels]
        except KeyError:
            if len(self.series) >= MAX_SERIES:
                labels = (OTHER, *labels[1:])
            return self.series.setdefault(labels, self._new())

    def observe(self, value: float, *labels: str) -> None:
        """Record a value."""
        try:
            series = self.series[labels]
        except KeyError:
            series = self.get_series(*labels)
        # Most values fall into the first bucket and need no search.
        series.buckets[bisect_left(self.bounds, value) if value > self._lowest_bound else 0] += 1
        series.total += value

    def _new(self) -> Series:
        return Series([0] * (len(self.bounds) + 1))


@dataclass(slots=True)
class Counters:
    """Counters of this node since it started."""

    fired: int = 0
    skipped: int = 0
    started: int = 0
    ended: int = 0
    fenced: int = 0
    rescued: int = 0
    clock_steps: int = 0
    leader_changes: int = 0
    unhandled: int = 0
    lag_max: float = 0.0
    tolerance_breaches: int = 0
    claim_conflicts: int = 0
    duplicate_fires: int = 0
    fires: LabeledCounter = field(default_factory=LabeledCounter)
    attempts: LabeledCounter = field(default_factory=LabeledCounter)
    not_run: LabeledCounter = field(default_factory=lambda: LabeledCounter([reason.value for reason in Reason]))
    missed: LabeledCounter = field(default_factory=lambda: LabeledCounter(["unrecorded", "policy"]))
    audit_differences: LabeledCounter = field(
        default_factory=lambda: LabeledCounter([finding.value for finding in Finding])
    )
    history_rewound: LabeledCounter = field(default_factory=lambda: LabeledCounter(KINDS))
    deliveries: LabeledCounter = field(default_factory=LabeledCounter)
    of_features: dict[str, LabeledCounter] = field(default_factory=dict)
    """The counters of features, by the name of their metric."""
    delivery_check_verdicts: LabeledCounter = field(default_factory=lambda: LabeledCounter(VERDICTS))
    authentication_failures: LabeledCounter = field(default_factory=lambda: LabeledCounter(AUTHENTICATION_FAILURES))
    forwarded_headers_ignored: int = 0
    lag: Histogram = field(default_factory=lambda: Histogram(LAG_BUCKETS, labeled=False))
    run_durations: Histogram = field(default_factory=lambda: Histogram(DURATION_BUCKETS))
    timeout_ratios: Histogram = field(default_factory=lambda: Histogram(RATIO_BUCKETS))
    delivery_durations: Histogram = field(default_factory=lambda: Histogram(DURATION_BUCKETS))
    claim_sizes: Histogram = field(default_factory=lambda: Histogram(CLAIM_SIZE_BUCKETS, labeled=False))
    database_durations: Histogram = field(default_factory=lambda: Histogram(DATABASE_BUCKETS))
    _success_series: dict[str, tuple[Series, Series, Series, tuple[str, ...], tuple[str, ...]]] = field(
        default_factory=dict
    )
    """Series and keys that `record_success` updates, by topic."""

    @classmethod
    def for_features(cls, features: Iterable[Feature]) -> Counters:
        """Create the counters of a node with these features."""
        names = {name: labels for feature in features for name, labels in feature.counters.items()}
        return cls(of_features={name: LabeledCounter(labels) for name, labels in names.items()})

    def record_lag(self, lag: float, tolerance: float) -> None:
        """Record the start lag of a job and whether it exceeds the tolerance, both in seconds."""
        if lag > self.lag_max:
            self.lag_max = lag
        if lag < 0.0:
            lag = 0.0
        series = self.lag.series[()]
        series.buckets[bisect_left(LAG_BUCKETS, lag)] += 1
        series.total += lag
        self.tolerance_breaches += lag > tolerance

    def record_success(self, topic: str, took: float, timeout: float) -> None:
        """Count a handler attempt that completed its job, including its delivery. Durations are in seconds."""
        try:
            runs, ratios, delivering, attempt, fire = self._success_series[topic]
        except KeyError:
            if len(self._success_series) >= MAX_SERIES:
                self._success_series.clear()
            self.deliveries.series_key(*HANDLER_OK)
            runs, ratios, delivering, attempt, fire = self._success_series[topic] = (
                self.run_durations.get_series(topic), self.timeout_ratios.get_series(topic),
                self.delivery_durations.get_series("handler"),
                self.attempts.series_key(topic, "ok"), self.fires.series_key(topic, "ok"),
            )  # fmt: skip
        if took <= DURATION_BUCKETS[0] and took <= RATIO_BUCKETS[0] * timeout:  # the common case
            runs.buckets[0] += 1
            ratios.buckets[0] += 1
            delivering.buckets[0] += 1
        else:
            runs.buckets[bisect_left(DURATION_BUCKETS, took)] += 1
            ratios.buckets[bisect_left(RATIO_BUCKETS, took / timeout)] += 1
            delivering.buckets[bisect_left(DURATION_BUCKETS, took)] += 1
        runs.total += took
        ratios.total += took / timeout
        delivering.total += took
        self.deliveries.values[HANDLER_OK] += 1
        self.attempts.values[attempt] += 1
        self.fires.values[fire] += 1

    def record_completion(self, topic: str, completion: Completion) -> None:
        """Count the completion of an attempt."""
        match completion.state:
            case JobState.COMPLETED:
                self.attempts.add(topic, "ok")
                self.fires.add(topic, "ok")
            case JobState.SKIPPED:
                self.record_skipped({completion.reason or OTHER: 1})
            case JobState.CANCELLED:
                self.attempts.add(topic, "cancelled")
            case JobState.DISPATCHED:  # its result is counted when it is reported
                self.attempts.add(topic, "dispatched")
            case JobState.PENDING if not completion.uses_attempt:
                self.attempts.add(topic, "postponed")
            case state:
                self.attempts.add(
                    topic, {"TIMEOUT": "timeout", "LEASE_LOST": "lost"}.get(completion.code or "", "failed")
                )
                self.fires.add(topic, "dead" if state is JobState.FAILED else "failed")

    def record_skipped(self, reasons: dict[str, int]) -> None:
        """Count occurrences that did not run, by the reason stored in their rows."""
        for reason, count in reasons.items():
            self.not_run.add(reason, by=count)
            if reason in (Reason.MISSED, Reason.COALESCED, Reason.EXPIRED):
                self.missed.add("policy", by=count)
