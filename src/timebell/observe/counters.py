"""What a node counts while it runs. Plain numbers in memory: what reads them out is `metrics.py`.

Labels stay few: no job ids, no tenants, and from `MOST` topics on further ones count as `other`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from timebell.model.audit_findings import Finding
from timebell.model.job import Ending, JobState, Reason
from timebell.model.trigger import Observed

VERDICTS = ("passed", "condition", "quota", "orphaned", "paused", "withdrawn", "waits")
DELIVERED = "handler", "ok"
MOST = 500  # series of one metric
OTHER = "other"
LAG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0)
TIMES = (0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)
RATIOS = (0.1, 0.25, 0.5, 0.75, 0.8, 0.9, 0.95, 1.0)
FOUND = (1.0, 2.0, 5.0, 10.0, 50.0, 100.0, 500.0)
DATABASE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


class Tally:
    """Numbers that only rise, by label values. Those of `begin` are there from the start, as a rise from nothing
    goes unseen."""

    def __init__(self, begin: Sequence[str] = ()) -> None:
        self.values: dict[tuple[str, ...], int] = {(word,): 0 for word in begin}

    def add(self, *labels: str, by: int = 1) -> None:
        """Count."""
        try:
            self.values[labels] += by
        except KeyError:
            self.values[self.of(*labels)] += by

    def of(self, *labels: str) -> tuple[str, ...]:
        """The key of `values` under which these labels count."""
        if labels not in self.values:
            if len(self.values) >= MOST:
                labels = (OTHER, *labels[1:])
            self.values.setdefault(labels, 0)
        return labels


@dataclass(slots=True)
class Series:
    """How many values fell into each bucket (the last one has no bound), and their sum."""

    buckets: list[int]
    total: float = 0.0


class Spread:
    """How values are distributed, by label values: a histogram."""

    def __init__(self, bounds: Sequence[float], *, labelled: bool = True) -> None:
        self.bounds = bounds
        self._least = bounds[0]
        self.series: dict[tuple[str, ...], Series] = {} if labelled else {(): self._new()}

    def of(self, *labels: str) -> Series:
        """The series of these labels."""
        try:
            return self.series[labels]
        except KeyError:
            if len(self.series) >= MOST:
                labels = (OTHER, *labels[1:])
            return self.series.setdefault(labels, self._new())

    def observe(self, value: float, *labels: str) -> None:
        """Take a value in."""
        try:
            series = self.series[labels]
        except KeyError:
            series = self.of(*labels)
        series.buckets[bisect_left(self.bounds, value) if value > self._least else 0] += 1  # as most of them are
        series.total += value

    def _new(self) -> Series:
        return Series([0] * (len(self.bounds) + 1))


@dataclass(slots=True)
class Counters:
    """What this node saw since it started."""

    fired: int = 0
    skipped: int = 0
    started: int = 0
    ended: int = 0
    fenced: int = 0
    rescued: int = 0
    clock_steps: int = 0
    leader_changes: int = 0
    unheard: int = 0
    lag_max: float = 0.0
    tolerance_breaches: int = 0
    claim_conflicts: int = 0
    double_fires: int = 0
    fires: Tally = field(default_factory=Tally)
    attempts: Tally = field(default_factory=Tally)
    not_run: Tally = field(default_factory=lambda: Tally([reason.value for reason in Reason]))
    missed: Tally = field(default_factory=lambda: Tally(["unrecorded", "policy"]))
    differences: Tally = field(default_factory=lambda: Tally([finding.value for finding in Finding]))
    deliveries: Tally = field(default_factory=Tally)
    messages: Tally = field(default_factory=lambda: Tally(["accepted", "refused", "unknown", "again"]))
    scans: Tally = field(default_factory=lambda: Tally(["ok", "failed", "unauthorised", "orphaned"]))
    items: Tally = field(default_factory=lambda: Tally(["changed", "same", "stale", "set_aside"]))
    verdicts: Tally = field(default_factory=lambda: Tally(VERDICTS))
    refreshes: Tally = field(default_factory=lambda: Tally(["ok", "failed", "unauthorised"]))
    lag: Spread = field(default_factory=lambda: Spread(LAG, labelled=False))
    runs: Spread = field(default_factory=lambda: Spread(TIMES))
    ratios: Spread = field(default_factory=lambda: Spread(RATIOS))
    delivering: Spread = field(default_factory=lambda: Spread(TIMES))
    found: Spread = field(default_factory=lambda: Spread(FOUND, labelled=False))
    database: Spread = field(default_factory=lambda: Spread(DATABASE))
    _well: dict[str, tuple[Series, Series, Series, tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)
    """Of each topic what `went_well` counts in."""

    def late(self, lag: float, tolerance: float) -> None:
        """Count how late a job started, in seconds, and whether that is more than is tolerated."""
        if lag > self.lag_max:
            self.lag_max = lag
        if lag < 0.0:
            lag = 0.0
        series = self.lag.series[()]
        series.buckets[bisect_left(LAG, lag)] += 1
        series.total += lag
        self.tolerance_breaches += lag > tolerance

    def went_well(self, topic: str, took: float, timeout: float) -> None:
        """Count an attempt of a handler that completed its job: as its delivery, and `came_to`."""
        try:
            runs, ratios, delivering, attempt, fire = self._well[topic]
        except KeyError:
            if len(self._well) >= MOST:
                self._well.clear()
            self.deliveries.of(*DELIVERED)
            runs, ratios, delivering, attempt, fire = self._well[topic] = (
                self.runs.of(topic), self.ratios.of(topic), self.delivering.of("handler"),
                self.attempts.of(topic, "ok"), self.fires.of(topic, "ok"),
            )  # fmt: skip
        if took <= TIMES[0] and took <= RATIOS[0] * timeout:  # as most of them
            runs.buckets[0] += 1
            ratios.buckets[0] += 1
            delivering.buckets[0] += 1
        else:
            runs.buckets[bisect_left(TIMES, took)] += 1
            ratios.buckets[bisect_left(RATIOS, took / timeout)] += 1
            delivering.buckets[bisect_left(TIMES, took)] += 1
        runs.total += took
        ratios.total += took / timeout
        delivering.total += took
        self.deliveries.values[DELIVERED] += 1
        self.attempts.values[attempt] += 1
        self.fires.values[fire] += 1

    def came_to(self, topic: str, ending: Ending) -> None:
        """Count what an attempt came to."""
        match ending.state:
            case JobState.COMPLETED:
                self.attempts.add(topic, "ok")
                self.fires.add(topic, "ok")
            case JobState.SKIPPED:
                self.left_out({ending.reason or OTHER: 1})
            case JobState.CANCELLED:
                self.attempts.add(topic, "cancelled")
            case JobState.DISPATCHED:  # what it comes to is counted where it is reported
                self.attempts.add(topic, "dispatched")
            case JobState.PENDING if not ending.counts:
                self.attempts.add(topic, "postponed")
            case state:
                self.attempts.add(topic, {"TIMEOUT": "timeout", "LEASE_LOST": "lost"}.get(ending.code or "", "failed"))
                self.fires.add(topic, "dead" if state is JobState.FAILED else "failed")

    def observed(self, found: Observed) -> None:
        """Count what changes of items came to."""
        for outcome in ("changed", "same", "stale"):
            self.items.add(outcome, by=getattr(found, outcome))
        self.items.add("set_aside", by=len(found.unfit))

    def left_out(self, reasons: dict[str, int]) -> None:
        """Count occurrences that did not run, by the reason in their rows."""
        for reason, count in reasons.items():
            self.not_run.add(reason, by=count)
            if reason in (Reason.MISSED, Reason.COALESCED, Reason.EXPIRED):
                self.missed.add("policy", by=count)
