"""How a tenant stands: read at most once a second in a process, however many look."""

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
from timebell.model.decide import upcoming
from timebell.model.schedule import Schedule
from timebell.store.audit import overview as rows
from timebell.store.audit.overview import Signals
from timebell.store.campaigns import progress
from timebell.store.campaigns.progress import ChunkMap

FRESH = 1.0  # seconds
AHEAD_FRESH = 15.0
RUNS_FRESH = 60.0
WHOLE = 60.0  # seconds for which only the newest of what ended is read again
SETTLED = timedelta(seconds=10)  # what ended so long ago has long been written
GRACE = 60.0  # seconds after which a schedule that has not fired needs somebody
AHEAD, WEEK, LANES, SOONEST = timedelta(hours=24), timedelta(days=7), 8, 200
DENSE = 48  # fires from which a lane is a bar: dots would touch
MOST_FIRES = 2_000
LAGS = 1_000  # of the newest, of which the start lag is told
HOURS = 48
LATELY = 10.0  # seconds over which the pace of a campaign is told
MEANT_FRESH = 300.0
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Lane:
    """What a schedule fires in the next day, or week; `dense` means a bar."""

    schedule: Schedule
    fires: list[datetime]
    dense: bool


@dataclass(frozen=True, slots=True)
class Ahead:
    """What comes: lanes, how much within an hour (`complete` if all was counted), its largest minute, and the fires of
    each two minutes of it."""

    lanes: list[Lane]
    hour: int
    complete: bool
    burst: tuple[datetime, int] | None
    shape: list[float]

    def after(self, now: datetime) -> datetime | None:
        """What fires next, as far as is known here."""
        return min((at for lane in self.lanes for at in lane.fires if at > now), default=None)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The figures of the first page. Lags are seconds; None: nothing ran."""

    signals: Signals
    ahead: Ahead
    median: float | None
    p99: float | None
    rate: int
    ran: int
    failed: int
    worst: str | None
    worst_failed: int
    lags: list[float]
    rates: list[float]

    @property
    def missed(self) -> int:
        """Occurrences of the last day that were missed."""
        return sum(one.count for one in self.signals.missed)

    @property
    def topics(self) -> list[dict[str, Any]]:
        """The busiest topics: runs, failures, and what 95 in 100 took at most (milliseconds)."""
        took: dict[str, list[float]] = {}
        failed: Counter[str] = Counter()
        for row in _ran(self.signals):
            took.setdefault(row.topic, []).append((row.finished_at - row.started_at).total_seconds())
            failed[row.topic] += row.state == "failed"
        busiest = sorted(took.items(), key=lambda one: -len(one[1]))[:6]
        return [
            {
                "topic": topic,
                "runs": len(each),
                "failed": failed[topic],
                "p95": round(1000 * (_at(sorted(each), 0.95) or 0)),
            }
            for topic, each in busiest
        ]

    @property
    def needs(self) -> int:
        """How many things need somebody."""
        found = self.signals
        listed = (found.missed, found.overdue, found.faults, found.disabled, found.dead_lately, found.gated,
                  found.sources, found.quota)  # fmt: skip
        return sum(map(len, listed)) + bool(found.waiting) + found.stopped


@dataclass(frozen=True, slots=True)
class Far:
    """How far a campaign is: its chunks, and how many it is for."""

    map: ChunkMap
    meant: int


class Now:
    """What was read last of each tenant."""

    def __init__(self, app: Timebell) -> None:
        self._app = app
        self._kept: dict[tuple[str, str], tuple[Any, float]] = {}
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        self._hours: dict[str, dict[datetime, dict[str, int]]] = {}
        self._ended: dict[str, tuple[list[Any], float]] = {}  # newest first, and when all of them were read

    async def tiles(self, tenant_id: str) -> Tiles:
        """The figures, at most a second old."""
        ahead = await self.ahead(tenant_id)

        async def read() -> Tiles:
            now, at = self._app.clock.now(), self._app.clock.monotonic()
            known, whole = self._ended.get(tenant_id, ([], at))
            if at - whole >= WHOLE:
                known = []
            since = max(now - HOUR, known[0].finished_at - SETTLED) if known else now - HOUR
            found: Signals = await self._app.store.run(rows.signals, tenant_id, now, GRACE, since)
            first = bisect_right(known, now - since, key=lambda row: now - row.finished_at)  # newest first
            beyond = bisect_right(known, HOUR, key=lambda row: now - row.finished_at)
            ended = [*found.ended, *known[first:beyond]][: rows.NEWEST]
            self._ended[tenant_id] = (ended, whole if known else at)
            return _tiles(replace(found, ended=ended), ahead, now)

        return await self._fresh("tiles", tenant_id, FRESH, read)  # type: ignore[no-any-return]

    def dead(self, tenant_id: str) -> int:
        """How many dead letters there were when somebody last looked; 0: none, or nobody has."""
        kept = self._kept.get(("tiles", tenant_id))
        return kept[0].signals.dead if kept is not None else 0

    def counts(self, tenant_id: str) -> dict[str, int]:
        """How many jobs wait, run and are dead, when somebody last looked."""
        kept = self._kept.get(("tiles", tenant_id))
        return {**kept[0].signals.counts, "failed": kept[0].signals.dead} if kept is not None else {}

    def sending(self, tenant_id: str) -> int:
        """How many campaigns were under way when somebody last looked."""
        kept = self._kept.get(("tiles", tenant_id))
        return kept[0].signals.sending if kept is not None else 0

    async def campaign(self, tenant_id: str, id_: str) -> Far:
        """How far a campaign is, at most a second old; its audience is counted less often, as it may be large."""
        of = await self._app.campaigns.get(id_, tenant_id=tenant_id)

        async def count() -> int:
            return await self._app.store.run(progress.meant, of)

        begun = "begun" if of.cutoff else "planned"
        meant = await self._fresh(begun, f"{tenant_id} {id_}", MEANT_FRESH if of.cutoff else AHEAD_FRESH, count)
        total = max(meant, of.expected or 0)

        async def read() -> ChunkMap:
            since = self._app.clock.now() - timedelta(seconds=LATELY)
            return await self._app.store.run(progress.chunk_map, of, total, since)

        return Far(await self._fresh("chunks", f"{tenant_id} {id_}", FRESH, read), meant)

    async def audience(
        self, tenant_id: str, filters: str, count: Callable[[], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        """What `count` says of these filters, at most some seconds old."""
        return await self._fresh("audience", f"{tenant_id} {filters}", AHEAD_FRESH, count)  # type: ignore[no-any-return]

    async def ahead(self, tenant_id: str) -> Ahead:
        """What comes, at most some seconds old."""

        async def read() -> Ahead:
            now = self._app.clock.now()
            found: list[Schedule] = await self._app.store.run(rows.soonest, tenant_id, now + AHEAD, SOONEST)
            due: int = await self._app.store.run(rows.due, tenant_id, now + timedelta(hours=1))
            return await asyncio.to_thread(_ahead, found, due, now)

        return await self._fresh("ahead", tenant_id, AHEAD_FRESH, read)  # type: ignore[no-any-return]

    async def week(self, tenant_id: str) -> list[Lane]:
        """What fires in the next seven days, at most a minute old."""

        async def read() -> list[Lane]:
            now = self._app.clock.now()
            found: list[Schedule] = await self._app.store.run(rows.soonest, tenant_id, now + WEEK, LANES)
            return await asyncio.to_thread(_lanes, found, now)

        return await self._fresh("week", tenant_id, RUNS_FRESH, read)  # type: ignore[no-any-return]

    async def runs(self, tenant_id: str) -> list[tuple[datetime, dict[str, int]]]:
        """What ended in each of the last hours, at most a minute old. An hour that is over is counted once, each in a
        transaction of its own: a long history must not hold up what fires."""

        async def read() -> list[tuple[datetime, dict[str, int]]]:
            current = self._app.clock.now().replace(minute=0, second=0, microsecond=0)
            hours = [current - step * HOUR for step in range(1, HOURS)]
            kept = self._hours.setdefault(tenant_id, {})  # each at once: who is cut short goes on the next time
            for hour in hours:
                if hour not in kept:
                    kept[hour] = await self._within(tenant_id, hour)
            self._hours[tenant_id] = {hour: kept[hour] for hour in hours}
            return sorted({**self._hours[tenant_id], current: await self._within(tenant_id, current)}.items())

        return await self._fresh("runs", tenant_id, RUNS_FRESH, read)  # type: ignore[no-any-return]

    async def _within(self, tenant_id: str, hour: datetime) -> dict[str, int]:
        return await self._app.store.run(rows.ended_within, tenant_id, hour, hour + HOUR)

    async def _fresh(self, what: str, tenant_id: str, seconds: float, read: Any) -> Any:
        key, clock = (what, tenant_id), self._app.clock
        if len(self._kept) > 10_000:
            self._kept.clear()
            self._locks.clear()
            self._hours.clear()
            self._ended.clear()
        async with self._locks.setdefault(key, asyncio.Lock()):
            kept = self._kept.get(key)
            if kept is None or clock.monotonic() - kept[1] >= seconds:
                kept = self._kept[key] = (await read(), clock.monotonic())
        return kept[0]


def _ahead(found: Sequence[Schedule], due: int, now: datetime) -> Ahead:
    lanes: list[Lane] = []
    hour, complete = due, len(found) < SOONEST
    minutes: Counter[datetime] = Counter()
    left = MOST_FIRES
    for schedule in found:
        fires = []
        for at in upcoming(schedule, now, now + AHEAD):
            left -= 1
            if at < now + timedelta(hours=1):
                hour += 1
                minutes[at.replace(second=0, microsecond=0)] += 1
            fires.append(at)
            if (len(fires) >= DENSE and at >= now + timedelta(hours=1)) or left < 0:
                break
        complete &= left >= 0
        if fires and len(lanes) < LANES:
            lanes.append(Lane(schedule, fires, len(fires) >= DENSE))
        if left < 0:
            break
    burst = max(minutes.items(), key=lambda one: one[1], default=None)
    return Ahead(lanes, hour, complete, burst, _shape(minutes, now))


def _shape(minutes: Counter[datetime], now: datetime) -> list[float]:
    """Fires in each two minutes of the next hour; none, if there are none."""
    first = now.replace(second=0, microsecond=0)
    spans = Counter(int((at - first) / (2 * MINUTE)) for at in minutes.elements())
    return [float(spans[n]) for n in range(30)] if minutes else []


def _lanes(found: Sequence[Schedule], now: datetime) -> list[Lane]:
    each = ((schedule, list(islice(upcoming(schedule, now, now + WEEK), DENSE))) for schedule in found)
    return [Lane(schedule, fires, len(fires) >= DENSE) for schedule, fires in each if fires]


def _ran(found: Signals) -> list[Any]:
    return [row for row in found.ended if row.state in ("completed", "failed") and row.started_at is not None]


def _tiles(found: Signals, ahead: Ahead, now: datetime) -> Tiles:
    ran = _ran(found)
    lags = [max(0.0, (row.started_at - row.run_at).total_seconds()) for row in ran[:LAGS]]
    lately = bisect_right(ran, MINUTE, key=lambda row: now - row.finished_at)  # newest first
    if ran and lately == len(ran) >= rows.NEWEST:
        lately = round(60 * len(ran) / max(0.001, (now - ran[-1].finished_at).total_seconds()))
    failed = Counter(row.topic for row in ran if row.state == "failed")
    worst = next(iter(failed.most_common(1)), None)
    ordered = sorted(lags)
    return Tiles(
        found, ahead, _at(ordered, 0.5), _at(ordered, 0.99), lately, len(ran), failed.total(),
        worst[0] if worst else None, worst[1] if worst else 0, _mean(lags, 28), _rates(ran, now),
    )  # fmt: skip


def _at(ordered: list[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _mean(newest_first: list[float], parts: int) -> list[float]:
    """Means of equal parts, oldest first."""
    size = max(1, len(newest_first) // parts)
    cut = [newest_first[at : at + size] for at in range(0, len(newest_first), size)]
    return [sum(one) / len(one) for one in reversed(cut)][-parts:]


def _rates(ran: list[Any], now: datetime) -> list[float]:
    """Ends in each of the last 28 spans of two minutes, oldest first."""
    spans = (bisect_left(ran, age * 2 * MINUTE, key=lambda row: now - row.finished_at) for age in range(1, 29))
    older = [0, *spans]
    return [float(older[age + 1] - older[age]) for age in range(27, -1, -1)]
