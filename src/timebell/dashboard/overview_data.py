"""Cached figures of the overview page, per tenant.

Each figure is read from the store at most once per interval and process, regardless of the number of viewers.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

from timebell.app import Timebell
from timebell.errors import StoreUnreachable
from timebell.feature import Feature
from timebell.model.attempts import first_start
from timebell.model.decide import upcoming
from timebell.model.schedule import Schedule
from timebell.store.audit import overview as rows
from timebell.store.audit.overview import TenantStatus
from timebell.store.tenancy import tenants

TILES_TTL_SECONDS = 1.0
UPCOMING_TTL_SECONDS = 15.0
RUNS_TTL_SECONDS = 60.0
FULL_RELOAD_INTERVAL_SECONDS = 60.0  # in between, only the newest finished jobs are read again
LATE_COMMIT_MARGIN = timedelta(seconds=10)  # a finished job is assumed to be committed within this time
OVERDUE_AFTER_SECONDS = 60.0  # a schedule that is late by more needs attention
UPCOMING_PERIOD, WEEK, MAX_TIMELINES, MAX_SCHEDULES = timedelta(hours=24), timedelta(days=7), 8, 200
DENSE_FIRES = 48  # a timeline with this many runs is drawn as a bar, because dots would overlap
MAX_FIRES = 12_000
RECENT = timedelta(minutes=15)
LAG_SAMPLE_SIZE = 1_000  # newest runs that the start lag is computed from
MAX_TENANTS, TENANTS_TTL_SECONDS = 1_000, 10.0
LAG_SAMPLE_PER_SPAN = 200
MAX_COUNTED_SPANS = 5_000  # finished spans of a tenant whose outcomes are kept
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class ScheduleTimeline:
    """Upcoming runs of one schedule within a day or a week; `is_dense`: drawn as a bar, and `fires` may be cut."""

    schedule: Schedule
    fires: list[datetime]
    is_dense: bool


@dataclass(frozen=True, slots=True)
class Upcoming:
    """Upcoming runs of a tenant.

    `peak` is the minute with the most runs within the next hour, and their number. `next_hour_histogram` counts runs
    in spans of two minutes. `is_complete` is false if counting stopped at a limit. `timelines` has the schedules, those
    that run less than DENSE_FIRES times first, each by time.
    """

    timelines: list[ScheduleTimeline]
    next_hour_count: int
    is_complete: bool
    peak: tuple[datetime, int] | None
    next_hour_histogram: list[float]

    @property
    def charted(self) -> list[ScheduleTimeline]:
        """The timelines that are drawn."""
        return self.timelines[:MAX_TIMELINES]

    @property
    def hidden(self) -> int:
        """Number of timelines that are not drawn."""
        return max(0, len(self.timelines) - MAX_TIMELINES)

    def next_fires_after(self, now: datetime) -> list[datetime]:
        """Return the next run of each schedule after `now`."""
        positions = [(timeline.fires, bisect_right(timeline.fires, now)) for timeline in self.timelines]
        return [fires[position] for fires, position in positions if position < len(fires)]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Figures of the overview tiles, of the last hour. Lags are seconds; None: nothing ran. `rate` is per minute.

    `recent_p99_lag` is that of the runs finished within RECENT. `is_stale`: the database has not answered since
    `read_at`.
    """

    signals: TenantStatus
    upcoming: Upcoming
    read_at: datetime
    median_lag: float | None
    p99_lag: float | None
    recent_p99_lag: float | None
    rate: int
    ran: int
    failed: int
    worst_topic: str | None
    worst_failed: int
    lags: list[float]
    rates: list[float]
    is_stale: bool = False

    @property
    def next_run(self) -> datetime | None:
        """The earliest due time after `read_at`, of a schedule or of a pending job."""
        due_at = self.signals.next_due_at
        jobs = [due_at] if due_at is not None and due_at > self.read_at else []
        return min([*self.upcoming.next_fires_after(self.read_at), *jobs], default=None)

    @property
    def missed(self) -> int:
        """Number of occurrences missed within the last day."""
        return sum(item.count for item in self.signals.missed)

    @property
    def topics(self) -> list[dict[str, Any]]:
        """The six topics with the most runs: number of runs and failures, 95th percentile of the duration (ms)."""
        durations_by_topic: dict[str, list[float]] = {}
        failed: Counter[str] = Counter()
        for row in _finished_runs(self.signals):
            durations_by_topic.setdefault(row.topic, []).append((row.finished_at - row.started_at).total_seconds())
            failed[row.topic] += row.state == "failed"
        busiest = sorted(durations_by_topic.items(), key=lambda item: -len(item[1]))[:6]
        return [
            {
                "topic": topic,
                "runs": len(durations),
                "failed": failed[topic],
                "p95": round(1000 * (_quantile(sorted(durations), 0.95) or 0)),
            }
            for topic, durations in busiest
        ]

    @property
    def attention_count(self) -> int:
        """Number of items that need attention."""
        s = self.signals
        of_features = (status.attention for status in s.of_features.values())
        lists: tuple[Sequence[object], ...] = (
            s.missed, s.overdue, s.errored, s.disabled, s.dead_lately, s.quota, s.unhandled, s.late_queues,
            s.never_firing, s.rewinds, *of_features,
        )  # fmt: skip
        return sum(map(len, lists)) + bool(s.backlog_jobs) + s.stopped


@dataclass(frozen=True, slots=True)
class RunSpan:
    """Outcomes of the occurrences that ended in [start, end): done, failed, missed, other."""

    start: datetime
    end: datetime
    counts: Counter[str]

    @property
    def total(self) -> int:
        """Number of completed, failed and missed ones."""
        return self.counts["done"] + self.counts["failed"] + self.counts["missed"]


@dataclass(frozen=True, slots=True)
class LagSpan:
    """Start lags of the runs of a span, in seconds; `position` is the index of the span."""

    position: int
    span: RunSpan
    median: float
    p99: float


class OverviewCache:
    """Cache of the figures of each tenant; concurrent requests for the same figure share one read."""

    def __init__(self, app: Timebell) -> None:
        self._app = app
        self._entries: dict[tuple[str, str], tuple[Any, float]] = {}
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        self._outcomes: dict[str, dict[tuple[datetime, timedelta], dict[str, int]]] = {}
        self._recent_runs: dict[str, tuple[list[Any], float]] = {}  # newest first; time of the last full read

    async def tiles(self, tenant_id: str) -> Tiles:
        """Return the tiles, at most a second old; older ones, marked as stale, while the database does not answer."""
        try:
            return await self._current_tiles(tenant_id)
        except StoreUnreachable:
            entry = self._entries.get(("tiles", tenant_id))
            if entry is None:
                raise
            stale: Tiles = entry[0] if entry[0].is_stale else replace(entry[0], is_stale=True)
            self._entries["tiles", tenant_id] = (stale, entry[1])
            return stale

    async def _current_tiles(self, tenant_id: str) -> Tiles:
        upcoming_fires = await self.upcoming(tenant_id)

        async def load() -> Tiles:
            now, at = self._app.clock.now(), self._app.clock.monotonic()
            known_rows, fully_read_at = self._recent_runs.get(tenant_id, ([], at))
            if at - fully_read_at >= FULL_RELOAD_INTERVAL_SECONDS:
                known_rows = []
            since = max(now - HOUR, known_rows[0].finished_at - LATE_COMMIT_MARGIN) if known_rows else now - HOUR
            status: TenantStatus = await self._app.store.run(
                rows.get_status, tenant_id, now, OVERDUE_AFTER_SECONDS, self._app.features, since
            )
            # Newest first: append the known rows between `since` and an hour ago to those just read.
            start = bisect_right(known_rows, now - since, key=lambda row: now - row.finished_at)
            end = bisect_right(known_rows, HOUR, key=lambda row: now - row.finished_at)
            ended = [*status.ended, *known_rows[start:end]][: rows.MAX_FINISHED_ROWS]
            self._recent_runs[tenant_id] = (ended, fully_read_at if known_rows else at)
            return _build_tiles(replace(status, ended=ended), upcoming_fires, now)

        return await self.cached("tiles", tenant_id, TILES_TTL_SECONDS, load)  # type: ignore[no-any-return]

    def dead_count(self, tenant_id: str) -> int:
        """Return the cached number of dead letters; 0 if the tiles have not been read."""
        status = self._cached_status(tenant_id)
        return status.dead if status is not None else 0

    def counts(self, tenant_id: str) -> dict[str, int]:
        """Return the cached numbers of pending, running and failed jobs; empty if the tiles have not been read."""
        status = self._cached_status(tenant_id)
        return {**status.counts, "failed": status.dead} if status is not None else {}

    def active_counts(self, tenant_id: str) -> dict[Feature, int]:
        """Return the cached numbers of active objects of features; empty if the tiles have not been read."""
        status = self._cached_status(tenant_id)
        return {feature: each.active for feature, each in status.of_features.items()} if status is not None else {}

    def _cached_status(self, tenant_id: str) -> TenantStatus | None:
        entry = self._entries.get(("tiles", tenant_id))
        return entry[0].signals if entry is not None else None

    async def upcoming(self, tenant_id: str) -> Upcoming:
        """Return the upcoming runs, at most 15 s old."""

        async def load() -> Upcoming:
            now = self._app.clock.now()
            schedules: list[Schedule] = await self._app.store.run(
                rows.list_next_to_fire, tenant_id, now + UPCOMING_PERIOD, MAX_SCHEDULES
            )
            due: int = await self._app.store.run(rows.count_due, tenant_id, now + timedelta(hours=1))
            return await asyncio.to_thread(_build_upcoming, schedules, due, now)

        return await self.cached("upcoming", tenant_id, UPCOMING_TTL_SECONDS, load)  # type: ignore[no-any-return]

    async def week(self, tenant_id: str) -> list[ScheduleTimeline]:
        """Return the timelines of the next seven days, at most a minute old."""

        async def load() -> list[ScheduleTimeline]:
            now = self._app.clock.now()
            schedules: list[Schedule] = await self._app.store.run(
                rows.list_next_to_fire, tenant_id, now + WEEK, MAX_TIMELINES
            )
            return await asyncio.to_thread(_build_timelines, schedules, now)

        return await self.cached("week", tenant_id, RUNS_TTL_SECONDS, load)  # type: ignore[no-any-return]

    async def runs(self, tenant_id: str, start: datetime, step: timedelta, count: int) -> list[RunSpan]:
        """Return the outcomes of `count` spans of the length `step`, at most a minute old.

        A finished hour or shorter span is counted only once, each in its own transaction, so that a long history does
        not delay the engine. After a page timeout, the next request continues where this one stopped.
        """
        now = self._app.clock.now()
        unit, counts = min(step, HOUR), self._outcomes.setdefault(tenant_id, {})
        if len(counts) > MAX_COUNTED_SPANS:
            counts.clear()

        async def count_span(span_start: datetime) -> dict[str, int]:
            counted = counts.get((span_start, unit))
            if counted is None:
                counted = await self._app.store.run(rows.count_outcomes, tenant_id, span_start, span_start + unit)
                if span_start + unit + LATE_COMMIT_MARGIN <= now:
                    counts[span_start, unit] = counted
            return counted

        async def load() -> list[RunSpan]:
            spans = []
            for n in range(count):
                total: Counter[str] = Counter()
                for part in range(step // unit):
                    total.update(await count_span(start + n * step + part * unit))
                spans.append(RunSpan(start + n * step, start + (n + 1) * step, total))
            return spans

        key = f"{tenant_id} {start.isoformat()} {step} {count}"
        return await self.cached("runs", key, RUNS_TTL_SECONDS, load)  # type: ignore[no-any-return]

    async def lags(self, tenant_id: str, spans: Sequence[RunSpan]) -> list[LagSpan]:
        """Return the start lags of the spans with runs, of LAG_SAMPLE_PER_SPAN runs each, at most a minute old."""

        async def load() -> list[LagSpan]:
            result = []
            for position, span in enumerate(spans):
                if span.counts["done"] or span.counts["failed"]:
                    sample = await self._app.store.run(
                        rows.sample_lags, tenant_id, span.start, span.end, LAG_SAMPLE_PER_SPAN
                    )
                    if (median := _quantile(sample, 0.5)) is not None:
                        result.append(LagSpan(position, span, median, _quantile(sample, 0.99) or median))
            return result

        key = (
            f"{tenant_id} {spans[0].start.isoformat()} {spans[-1].end.isoformat()} {len(spans)}" if spans else tenant_id
        )
        return await self.cached("lags", key, RUNS_TTL_SECONDS, load)  # type: ignore[no-any-return]

    async def tenant_ids(self) -> list[str]:
        """Return the ids of up to MAX_TENANTS tenants, at most TENANTS_TTL_SECONDS old."""

        async def load() -> list[str]:
            page = await self._app.store.run(tenants.list_tenants, MAX_TENANTS, None)
            return sorted(tenant.id for tenant in page)

        return await self.cached("tenants", "", TENANTS_TTL_SECONDS, load)  # type: ignore[no-any-return]

    async def cached(self, kind: str, key: str, seconds: float, load: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result of `load` for a figure and a key that begins with the tenant, at most `seconds` old."""
        entry_key, clock = (kind, key), self._app.clock
        if len(self._entries) > 10_000:
            self._entries.clear()
            self._locks.clear()
            self._outcomes.clear()
            self._recent_runs.clear()
        async with self._locks.setdefault(entry_key, asyncio.Lock()):
            entry = self._entries.get(entry_key)
            if entry is None or clock.monotonic() - entry[1] >= seconds:
                entry = self._entries[entry_key] = (await load(), clock.monotonic())
        return entry[0]


def _build_upcoming(schedules: Sequence[Schedule], due: int, now: datetime) -> Upcoming:
    timelines: list[ScheduleTimeline] = []
    next_hour_count, is_complete = due, len(schedules) < MAX_SCHEDULES
    fires_by_minute: Counter[datetime] = Counter()
    remaining = MAX_FIRES
    for schedule in schedules:
        fires = []
        for at in upcoming(schedule, now, now + UPCOMING_PERIOD):
            remaining -= 1
            if at < now + timedelta(hours=1):
                next_hour_count += 1
                fires_by_minute[at.replace(second=0, microsecond=0)] += 1
            fires.append(at)
            if (len(fires) >= DENSE_FIRES and at >= now + timedelta(hours=1)) or remaining < 0:
                break
        is_complete &= remaining >= 0
        if fires:
            timelines.append(ScheduleTimeline(schedule, fires, len(fires) >= DENSE_FIRES))
        if remaining < 0:
            break
    peak = max(fires_by_minute.items(), key=lambda item: item[1], default=None)
    timelines.sort(key=lambda timeline: timeline.is_dense)  # stable: soonest first
    histogram = _fires_per_two_minutes(fires_by_minute, now)
    return Upcoming(timelines, next_hour_count, is_complete, peak, histogram)


def _fires_per_two_minutes(fires_by_minute: Counter[datetime], now: datetime) -> list[float]:
    """Return the number of runs in each two minutes of the next hour; empty if there are none."""
    start = now.replace(second=0, microsecond=0)
    spans = Counter(int((at - start) / (2 * MINUTE)) for at in fires_by_minute.elements())
    return [float(spans[n]) for n in range(30)] if fires_by_minute else []


def _build_timelines(schedules: Sequence[Schedule], now: datetime) -> list[ScheduleTimeline]:
    planned = ((schedule, list(islice(upcoming(schedule, now, now + WEEK), DENSE_FIRES))) for schedule in schedules)
    return [ScheduleTimeline(schedule, fires, len(fires) >= DENSE_FIRES) for schedule, fires in planned if fires]


def _finished_runs(signals: TenantStatus) -> list[Any]:
    return [row for row in signals.ended if row.state in ("completed", "failed") and row.started_at is not None]


def _build_tiles(signals: TenantStatus, upcoming_fires: Upcoming, now: datetime) -> Tiles:
    runs = _finished_runs(signals)
    lags = [_lag_seconds(row) for row in runs[:LAG_SAMPLE_SIZE]]
    recent_lags = sorted(lags[: bisect_right(runs, RECENT, key=lambda row: now - row.finished_at)])
    rate = bisect_right(runs, MINUTE, key=lambda row: now - row.finished_at)  # newest first
    if runs and rate == len(runs) >= rows.MAX_FINISHED_ROWS:  # truncated within the minute: extrapolate
        rate = round(60 * len(runs) / max(0.001, (now - runs[-1].finished_at).total_seconds()))
    failed = Counter(row.topic for row in runs if row.state == "failed")
    worst = next(iter(failed.most_common(1)), None)
    ordered = sorted(lags)
    return Tiles(
        signals, upcoming_fires, now, _quantile(ordered, 0.5), _quantile(ordered, 0.99), _quantile(recent_lags, 0.99),
        rate, len(runs), failed.total(), worst[0] if worst else None, worst[1] if worst else 0,
        _part_means(lags, 28), _runs_per_two_minutes(runs, now),
    )  # fmt: skip


def _lag_seconds(row: Any) -> float:
    due_at, started_at = first_start(row.run_at, row.started_at, row.first_record)
    return max(0.0, (started_at - due_at).total_seconds())


def _quantile(ordered: list[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _part_means(newest_first: list[float], count: int) -> list[float]:
    """Split into `count` parts of equal size and return their means, oldest first."""
    size = max(1, len(newest_first) // count)
    parts = [newest_first[start : start + size] for start in range(0, len(newest_first), size)]
    return [sum(part) / len(part) for part in reversed(parts)][-count:]


def _runs_per_two_minutes(runs: list[Any], now: datetime) -> list[float]:
    """Return the number of runs finished in each of the last 28 spans of two minutes, oldest first."""
    # Number of runs younger than each age; the differences are the counts of the spans.
    younger = [0]
    younger += (bisect_left(runs, age * 2 * MINUTE, key=lambda row: now - row.finished_at) for age in range(1, 29))
    return [float(younger[age + 1] - younger[age]) for age in range(27, -1, -1)]
