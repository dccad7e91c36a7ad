"""The metrics by name, and how they are told to Prometheus. docs/reference/metrics.md says what each is for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from timebell.observe.counters import Counters, Spread, Tally
from timebell.observe.exposition import Family, Kind, Sample
from timebell.store.cluster.gauges import Gauges


class Named(NamedTuple):
    """A metric: what kind it is, its labels, and what it says."""

    kind: Kind
    labels: tuple[str, ...]
    help: str


METRICS: dict[str, Named] = {
    "timebell_fires_total": Named(
        "counter", ("topic", "outcome"), "What starts came to: ok, failed (to be tried again), dead (for good)."
    ),
    "timebell_fires_not_run_total": Named("counter", ("reason",), "Occurrences this node skipped, by reason."),
    "timebell_attempts_total": Named(
        "counter",
        ("topic", "outcome"),
        "Attempts that ended: ok, failed, timeout, lost, cancelled, postponed, dispatched.",
    ),
    "timebell_fire_lag_seconds": Named("histogram", (), "From due to the handler's first line, of first attempts."),
    "timebell_tolerance_breaches_total": Named("counter", (), "First attempts later than their schedule tolerates."),
    "timebell_run_duration_seconds": Named("histogram", ("topic",), "How long attempts took."),
    "timebell_run_timeout_ratio": Named("histogram", ("topic",), "How long attempts took, as a part of their timeout."),
    "timebell_deliveries_total": Named(
        "counter",
        ("target_kind", "code_class"),
        "Deliveries to targets: ok, error, timeout, stopped; of HTTP 2xx to 5xx.",
    ),
    "timebell_delivery_duration_seconds": Named("histogram", ("target_kind",), "How long deliveries took."),
    "timebell_campaign_messages_total": Named(
        "counter", ("fate",), "Messages of campaigns this node tried: accepted, refused, unknown, again."
    ),
    "timebell_source_scans_total": Named(
        "counter", ("outcome",), "Looks at all of a source: ok, failed, unauthorised, orphaned."
    ),
    "timebell_source_items_total": Named(
        "counter",
        ("outcome",),
        "Items that this node heard of or read: changed, same, stale; and those that cannot be kept: set_aside.",
    ),
    "timebell_gate_verdicts_total": Named(
        "counter",
        ("verdict",),
        "Attempts at the gate: passed, condition, quota, orphaned, paused, withdrawn, waits.",
    ),
    "timebell_connection_refreshes_total": Named(
        "counter", ("outcome",), "Tokens of connections renewed: ok, failed (it may pass), unauthorised."
    ),
    "timebell_due_found": Named("histogram", (), "Due jobs claimed by one look, of looks that found any."),
    "timebell_claim_conflicts_total": Named("counter", (), "Looks at what was due that found it taken."),
    "timebell_missed_total": Named(
        "counter", ("reason",), "Occurrences not run in time: policy (skipped), unrecorded (overdue or lost, no row)."
    ),
    "timebell_double_fires_total": Named("counter", (), "Occurrences that ran as two jobs. Always 0."),
    "timebell_audit_differences_total": Named("counter", ("finding",), "What the leader's audit found. Always 0."),
    "timebell_leader": Named("gauge", (), "Whether this node leads."),
    "timebell_leader_changes_total": Named("counter", (), "How often this node became leader."),
    "timebell_node_clock_skew_seconds": Named("gauge", (), "How far this machine's clock is ahead of the database's."),
    "timebell_node_slots": Named("gauge", ("state",), "Places for attempts on this node: busy, free."),
    "timebell_db_duration_seconds": Named(
        "histogram", ("op",), "How long operations of the store took, waiting included."
    ),
    "timebell_build_info": Named("gauge", ("version", "tzdata"), "Always 1."),
    "timebell_database_up": Named("gauge", (), "Whether the database answered; if not, what follows is left out."),
    "timebell_jobs": Named("gauge", ("state",), "Live jobs: pending, running, held."),
    "timebell_queue_depth": Named("gauge", ("queue",), "Jobs that are due and wait, by queue; paused queues left out."),
    "timebell_oldest_due_age_seconds": Named("gauge", (), "How long the oldest of them waits."),
    "timebell_unheard_jobs": Named("gauge", (), "Due jobs held because no live node listens to their topic."),
    "timebell_dead_letters": Named("gauge", (), "Jobs that failed for good and were not replayed."),
    "timebell_targets_disabled": Named("gauge", (), "Targets whose receiver is gone (410): jobs for them fail."),
    "timebell_sources": Named("gauge", ("state",), "Sources that cannot be read: failing, reauthorise, orphaned."),
    "timebell_schedules": Named("gauge", ("state",), "Schedules: active, paused, fault (set aside)."),
    "timebell_campaigns": Named("gauge", ("state",), "Campaigns that are not over: pending, running, paused."),
    "timebell_campaign_remaining": Named("gauge", (), "Recipients that running campaigns have still to be sent to."),
    "timebell_evaluation_lag_seconds": Named("gauge", (), "How long the first due schedule waits to be planned."),
    "timebell_schedule_overdue": Named(
        "gauge", ("schedule",), "Schedules that should have fired and did not. The label is opt-in."
    ),
    "timebell_schedule_last_success_timestamp_seconds": Named(
        "gauge", ("schedule",), "When a schedule last succeeded. Opt-in."
    ),
}


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node is now, besides its counters."""

    version: str
    tzdata: str
    leads: bool
    clock_skew: float
    busy: int
    free: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything one scrape tells. Without gauges the database did not answer."""

    counters: Counters
    node: NodeFacts
    gauges: Gauges | None
    labelled: bool

    def collect(self) -> Iterator[Family]:
        """All of it, metric by metric."""
        yield from self._counted()
        yield from self._distributed()
        yield from self._of_node()
        yield _gauge("timebell_database_up", self.gauges is not None)
        if self.gauges is not None:
            yield from self._stored(self.gauges)

    def _counted(self) -> Iterator[Family]:
        counters = self.counters
        yield _tally("timebell_fires_total", counters.fires)
        yield _tally("timebell_fires_not_run_total", counters.not_run)
        yield _tally("timebell_attempts_total", counters.attempts)
        yield _tally("timebell_deliveries_total", counters.deliveries)
        yield _tally("timebell_campaign_messages_total", counters.messages)
        yield _tally("timebell_missed_total", counters.missed)
        yield _tally("timebell_source_scans_total", counters.scans)
        yield _tally("timebell_source_items_total", counters.items)
        yield _tally("timebell_gate_verdicts_total", counters.verdicts)
        yield _tally("timebell_connection_refreshes_total", counters.refreshes)
        yield _count("timebell_tolerance_breaches_total", counters.tolerance_breaches)
        yield _count("timebell_claim_conflicts_total", counters.claim_conflicts)
        yield _count("timebell_double_fires_total", counters.double_fires)
        yield _tally("timebell_audit_differences_total", counters.differences)
        yield _count("timebell_leader_changes_total", counters.leader_changes)

    def _distributed(self) -> Iterator[Family]:
        counters = self.counters
        yield _spread("timebell_fire_lag_seconds", counters.lag)
        yield _spread("timebell_run_duration_seconds", counters.runs)
        yield _spread("timebell_run_timeout_ratio", counters.ratios)
        yield _spread("timebell_delivery_duration_seconds", counters.delivering)
        yield _spread("timebell_due_found", counters.found)
        yield _spread("timebell_db_duration_seconds", counters.database)

    def _of_node(self) -> Iterator[Family]:
        node = self.node
        yield _gauge("timebell_leader", node.leads)
        yield _gauge("timebell_node_clock_skew_seconds", node.clock_skew)
        yield _gauges("timebell_node_slots", [(("busy",), node.busy), (("free",), node.free)])
        yield _gauges("timebell_build_info", [((node.version, node.tzdata), 1)])

    def _stored(self, gauges: Gauges) -> Iterator[Family]:
        yield _gauges("timebell_jobs", _by_word(gauges.jobs.items()))
        yield _gauges("timebell_schedules", _by_word(gauges.schedules.items()))
        yield _gauges("timebell_campaigns", _by_word(gauges.campaigns.items()))
        yield _gauge("timebell_campaign_remaining", gauges.remaining)
        yield _gauges("timebell_queue_depth", _by_word(gauges.depths.items()))
        yield _gauge("timebell_oldest_due_age_seconds", gauges.oldest_due_age)
        yield _gauge("timebell_evaluation_lag_seconds", gauges.evaluation_lag)
        yield _gauge("timebell_unheard_jobs", gauges.unheard)
        yield _gauge("timebell_dead_letters", gauges.dead_letters)
        yield _gauge("timebell_targets_disabled", gauges.disabled)
        yield _gauges("timebell_sources", _by_word(gauges.sources.items()))
        if not self.labelled:
            yield _gauge("timebell_schedule_overdue", len(gauges.overdue))
            return
        yield _gauges("timebell_schedule_overdue", _by_word((one.label, 1) for one in gauges.overdue))
        successes = ((schedule, at.timestamp()) for schedule, at in gauges.successes.items())
        yield _gauges("timebell_schedule_last_success_timestamp_seconds", _by_word(successes))


def _by_word(values: Iterable[tuple[str, float]]) -> list[tuple[tuple[str, ...], float]]:
    return [((word,), value) for word, value in values]


def _count(name: str, value: float) -> Family:
    return _family(name, [Sample((), value)])


def _gauge(name: str, value: float) -> Family:
    return _family(name, [Sample((), value)])


def _gauges(name: str, values: Iterable[tuple[tuple[str, ...], float]]) -> Family:
    return _family(name, [Sample(_labels(name, labels), value) for labels, value in values])


def _tally(name: str, tally: Tally) -> Family:
    return _gauges(name, list(tally.values.items()))


def _spread(name: str, spread: Spread) -> Family:
    samples: list[Sample] = []
    bounds = [*(f"{bound:g}" for bound in spread.bounds), "+Inf"]
    for words, series in list(spread.series.items()):
        labels, count = _labels(name, words), 0
        for bound, more in zip(bounds, series.buckets, strict=True):
            count += more
            samples.append(Sample([*labels, ("le", bound)], count, "_bucket"))
        samples += [Sample(labels, count, "_count"), Sample(labels, series.total, "_sum")]
    return _family(name, samples)


def _labels(name: str, words: tuple[str, ...]) -> list[tuple[str, str]]:
    return list(zip(METRICS[name].labels, words, strict=True))


def _family(name: str, samples: list[Sample]) -> Family:
    return Family(name, METRICS[name].kind, METRICS[name].help, samples)
