"""One schedule on virtual time around midnight in which every policy has an effect, and its invariants.

Every two minutes from 23:46 to 00:58. The handler takes 150 s at 23:50, 200 s at 00:06 and 300 s at 00:24; all
nodes are down from 00:07:30 to 00:18:20, so that one job is interrupted and others are missed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

from timebell import Arrived, Cron, Every
from timebell.errors import Conflict, InvalidInput, NotFound
from timebell.model.job import Job, JobState, Kind, Reason
from timebell.model.schedule import Policies
from timebell.recurrence import Spec
from timebell.sim.world import World

GRID = Cron("0-58/2 0,23 * * *")
EDITED = Cron("1-59/2 0,23 * * *")
HANDLER_SECONDS = {"23:50": 150.0, "00:06": 200.0, "00:24": 300.0}
TICK = timedelta(microseconds=1)
LASTING_HOLDS = {"backlog", "unhandled"}  # holds that the scene does not release by itself


def at(clock: str) -> datetime:
    """Return an instant of the scene: from noon on 1 March, or before noon on 2 March."""
    hour, minute, *second = map(int, clock.split(":"))
    return datetime(2027, 3, 1 if hour >= 12 else 2, hour, minute, *second, tzinfo=UTC)


def format_clock(instant: datetime) -> str:
    return f"{instant:%H:%M:%S}" if instant.second else f"{instant:%H:%M}"


START, DOWN, UP, OVER = at("23:45"), at("00:07:30"), at("00:18:20"), at("01:30")


@dataclass
class Call:
    """One call of the handler."""

    event: Arrived
    started_at: datetime
    ended_at: datetime | None = None


class Scene:
    """A run of the scene with some policy values."""

    def __init__(self, *values: Any) -> None:
        self.values = values
        self.deliveries: list[Call] = []
        self.paused: list[tuple[datetime, datetime, bool]] = []
        self.stopped: list[tuple[datetime, datetime]] = []
        self.options: dict[str, Any] = {"name": "s", "timezone": "UTC"}
        self.spec: Spec = GRID
        for value in values:
            self.options |= value.options
            self.spec = value.spec or self.spec
        self.does = {clock: does for value in values for clock, does in value.does.items()}
        self.deleted = False
        self.repaired = 0

    def play(self) -> Scene:
        """Run the scene from 23:45 to 01:30."""
        with World(start=START) as world:
            self.world = world
            self.app = world.new_app()
            self.app.queue("narrow", concurrency=1)
            self.app.queue("grouped", concurrency_per_group=1)
            self.app.on("other", timeout=3600)(lambda event: asyncio.sleep(100))
            handler_starts = [value.handled_from for value in self.values if value.handled_from]
            if not handler_starts:
                self.app.on("t")(self.handle)
            world.run(self._make())
            world.outage(DOWN, UP)
            acts = [(at(clock), act) for value in self.values for clock, act in value.acts.items()]
            acts += [(at(clock), Scene.listen) for clock in handler_starts]
            for instant, act in sorted(acts, key=lambda one: one[0]):
                world.run(world.until(instant))
                world.run(act(self))
            world.run(world.until(OVER))
            world.run(self.repair())
            self.rows = world.run(self._rows())
            self.revisions = world.run(self.app.schedules.history(self.made.id))[::-1]
        return self

    async def _make(self) -> None:
        self.made = await self.app.schedule_repeat("t", self.spec, **self.options)
        if self.options.get("queue") == "narrow":  # another client locks the row at times
            await self.app.schedule_repeat("other", Cron("55 23 * * *") | Cron("23-40/6 0 * * *"), queue="narrow")

    async def _rows(self) -> list[Job]:
        found: list[Job] = []
        cursor = None
        while True:
            page = await self.app.list(schedule_id=self.made.id, limit=500, cursor=cursor)
            found += page
            if (cursor := page.next_cursor) is None:
                return sorted(found, key=lambda job: (job.scheduled_at, job.id))

    async def listen(self) -> None:
        self.app.on("t")(self.handle)
        await self.world.start()

    async def handle(self, event: Arrived) -> Any:
        one = Call(event, self.world.now)
        self.deliveries.append(one)
        try:
            nominal = event.scheduled_at
            clock = format_clock(
                nominal if not self.gridless else nominal.replace(minute=nominal.minute // 2 * 2, second=0)
            )
            planned = event.occurrence_key.count(".") == 1
            if planned and clock in self.does:
                self.does[clock](event)
            await asyncio.sleep(HANDLER_SECONDS.get(clock, 1) if planned and event.attempt == 1 else 1)
            return event.attempt
        finally:
            one.ended_at = self.world.now

    # Changes of the schedule.

    async def override(self, action: str, *clocks: str) -> None:
        for clock in clocks:
            if self.spec is GRID and not self.made.recurrence.has(at(clock)):
                continue  # excluded by a calendar or a bound
            moved = [at(clock) + timedelta(minutes=1)] if action == "move" else []
            with suppress(Conflict):
                await getattr(self.app.schedules, action)(self.made.id, at(clock), *moved)

    async def undo(self, *clocks: str) -> None:
        await self.override("skip", *clocks)
        for clock in clocks:
            with suppress(NotFound):
                await self.app.schedules.undo(self.made.id, at(clock))

    async def pause(self) -> None:
        await self.app.schedules.pause(self.made.id)
        self._paused_from = self.world.now

    async def resume(self, *, catch_up: bool = False) -> None:
        since = getattr(self, "_paused_from", START)
        await self.app.schedules.resume(self.made.id, catch_up=catch_up)
        self.paused.append((since, self.world.now, catch_up))

    async def trigger(self) -> None:
        await self.app.schedules.trigger(self.made.id)

    async def backfill(self, start: str, end: str) -> None:
        await self.app.schedules.backfill(self.made.id, at(start), at(end))

    async def release_backlog(self) -> None:
        await self.app.schedules.release(self.made.id)

    async def edit(self) -> None:
        spec = EDITED if self.spec is GRID else Every("PT3M", since=self.spec.since)  # type: ignore[attr-defined]
        options = self.options | {"payload": "edited"}
        await self.app.schedule_repeat("t", spec, replace=True, **options)

    async def revert(self) -> None:
        first = next(one.number for one in await self.app.schedules.history(self.made.id) if one.action.payload is None)
        await self.app.schedules.revert(self.made.id, first)

    async def delete(self) -> None:
        await self.app.schedules.delete(self.made.id)
        self.deleted = True

    async def cancel_all(self) -> None:
        await self.app.cancel_all(schedule_id=self.made.id)

    async def repair(self) -> None:
        self.repaired += (await self.app.repair()).repaired

    async def retry_failed(self) -> None:
        for job in await self.app.list(schedule_id=self.made.id, status="failed"):
            await self.app.retry(job.id)

    # Outcomes.

    @property
    def gridless(self) -> bool:
        return self.spec is not GRID

    @property
    def policies(self) -> Policies:
        return self.made.policies

    @property
    def planned(self) -> list[Job]:
        return [job for job in self.rows if job.kind is Kind.PLANNED]

    def outcomes(self, kind: Kind = Kind.PLANNED) -> dict[str, str]:
        """Return the outcome of each occurrence, such as `completed` or `skipped (overlap)`, with late start times."""
        found = {}
        for job in self.rows:
            if job.kind is not kind:
                continue
            outcome = f"{job.state.value} ({job.reason})" if job.reason else job.state.value
            found[format_clock(job.scheduled_at)] = f"{outcome} ({job.hold})" if job.hold else outcome
        return found

    def starts(self, clock: str) -> list[str]:
        """Return the start times of the attempts of a planned occurrence."""
        found = {job.id for job in self.planned if format_clock(job.scheduled_at) == clock}
        return [format_clock(one.started_at) for one in self.deliveries if one.event.job_id in found]

    def expected(self) -> Counter[datetime]:
        """Return the instants of each revision while it was valid."""
        found: Counter[datetime] = Counter()
        ends = [one.effective_at for one in self.revisions[1:]] + [OVER]
        for revision, end in zip(self.revisions, ends, strict=True):
            found.update(revision.recurrence.between(revision.effective_at + TICK, end + TICK))
        return found

    def check(self) -> None:
        """Assert the invariants of all policies."""
        self._check_one_outcome_per_occurrence()
        self._check_no_early_or_duplicate_runs()
        self._check_reasons()
        self._check_nothing_is_stuck()
        assert self.repaired == 0, "repaired an undamaged row"
        self._check_pauses()
        self._check_catch_up_bounds()
        self._check_expired_jobs()
        if self.policies.overlap != "allow":
            self._check_serial_runs()
        if self.gridless:
            self._check_delays()

    def _check_one_outcome_per_occurrence(self) -> None:
        assert all(job.skipped_count == 1 for job in self.rows)  # at most 100 here
        found = Counter(job.scheduled_at for job in self.planned)
        assert set(found.values()) <= {1}, "an occurrence has two rows"
        if not self.gridless:
            expected = self.expected()
            assert expected, "it has occurrences at all"
            missing, extra = expected - found, found - expected
            assert not missing, f"no row: {[format_clock(one) for one in sorted(missing)]}"
            assert not extra, f"no occurrence: {[format_clock(one) for one in sorted(extra)]}"
        ran = {job.scheduled_at for job in self.planned if job.state is not JobState.SKIPPED}
        ran |= {job.scheduled_at for job in self.planned if job.reason == Reason.OVERRIDE}
        again = Counter(job.scheduled_at for job in self.rows if job.kind is Kind.BACKFILL)
        assert set(again.values()) <= {1}, "backfilled twice"
        assert not ran & set(again), "backfilled what had run or was left out on purpose"

    def _check_no_early_or_duplicate_runs(self) -> None:
        attempts = Counter((one.event.occurrence_key, one.event.attempt) for one in self.deliveries)
        assert set(attempts.values()) <= {1}, "an attempt was delivered twice"
        by_id = {job.id: job for job in self.rows}
        last: dict[str, int] = {}
        for one in self.deliveries:
            job = by_id[one.event.job_id]
            assert one.started_at >= one.event.scheduled_at, "early"
            only = job.state is JobState.COMPLETED and job.attempt == 1
            assert one.started_at >= job.run_at or not only, "earlier than it was to start"
            assert one.event.attempt > last.get(job.id, 0), "attempts rise"
            last[job.id] = one.event.attempt
        started = {one.event.job_id for one in self.deliveries}
        spread = any(at("00:50") < job.scheduled_at < job.run_at for job in self.planned)  # nothing else delays these
        bounded = self.gridless or self.deleted or self.made.recurrence.end or self.made.recurrence.max_runs
        assert bounded or not self.policies.jitter or spread
        for job in self.rows:
            assert job.state is not JobState.SKIPPED or job.id not in started, "skipped, and yet it was delivered"
            assert job.run_at >= job.scheduled_at, "to start before its time"
            handled = job.result != {"listeners": 0}
            assert job.state is not JobState.COMPLETED or not handled or job.id in started, "completed without running"

    def _check_reasons(self) -> None:
        for job in self.rows:
            assert (job.state is JobState.SKIPPED) <= (job.reason in set(Reason)), job.reason
            assert (job.reason in set(Reason) - {Reason.EXPIRED}) <= (job.state is JobState.SKIPPED), job.reason

    def _check_nothing_is_stuck(self) -> None:
        live = [job for job in self.rows if job.state in (JobState.PENDING, JobState.RUNNING)]
        if any(job.hold in LASTING_HOLDS for job in live):
            return
        assert self.gridless or not live, f"still there: {[(format_clock(job.scheduled_at), job.hold) for job in live]}"
        assert not self.deleted or not live

    def _check_pauses(self) -> None:
        for since, until, catch_up in self.paused:
            for job in self.planned:
                if since < job.scheduled_at <= until and not self.gridless and not catch_up:
                    reasons = {Reason.PAUSED, Reason.OVERRIDE}
                    assert (job.state, job.reason in reasons) == (JobState.SKIPPED, True), format_clock(
                        job.scheduled_at
                    )
        acts = {clock for value in self.values for clock in value.acts}
        for value, since, until in (("queue", "00:23", "00:33"), ("pause_all", "00:22", "00:30:20")):
            if {since, until} <= acts:
                for one in self.deliveries:
                    assert not at(since) < one.started_at < at(until), (
                        f"{value} was paused at {format_clock(one.started_at)}"
                    )

    def _check_catch_up_bounds(self) -> None:
        policies, late = self.policies, 0
        for job in self.planned:
            if not self.gridless and job.scheduled_at <= UP - timedelta(seconds=policies.missed_after):
                fired = job.scheduled_at > DOWN and job.state is not JobState.SKIPPED
                late += fired
                assert not fired or UP - job.scheduled_at <= timedelta(seconds=policies.catch_up_window)
        limit = {"skip": 0, "latest": 1, "all": policies.catch_up_limit}[policies.catch_up]
        assert late <= (0 if policies.when_late == "expire" else limit)

    def _check_expired_jobs(self) -> None:
        by_id = {job.id: job for job in self.rows}
        for one in self.deliveries:
            expires = by_id[one.event.job_id].expires_at
            assert expires is None or one.started_at < expires, "it started past its time"

    def _check_serial_runs(self) -> None:
        for before, after in pairwise(sorted(self.deliveries, key=lambda one: one.started_at)):
            assert before.ended_at is not None
            assert after.started_at >= before.ended_at, f"two at {format_clock(after.started_at)}"

    def _check_delays(self) -> None:
        since_end = self.spec.since == "last_end"  # type: ignore[attr-defined]
        runs = [job for job in self.planned if job.state is not JobState.SKIPPED]
        for before, after in pairwise(runs):
            assert before.finished_at is not None, "the next came before the end"
            calls = [
                one for one in self.deliveries if one.event.job_id == before.id and one.started_at < after.scheduled_at
            ]
            started = calls[-1].started_at if calls else before.finished_at
            ended = calls[-1].ended_at if calls else before.finished_at  # a failed job may be retried later
            assert ended is not None
            assert after.scheduled_at >= (ended if before.state is JobState.FAILED else before.finished_at)
            assert after.scheduled_at >= (ended if since_end else started) + timedelta(minutes=2)


async def refused(scene: Scene) -> str:
    """Return the error code with which a pair is refused."""
    try:
        await scene._make()
        for value in scene.values:
            for act in value.acts.values():
                await act(scene)
    except InvalidInput as error:
        return error.code
    return "not refused"
