"""One schedule on virtual time around midnight, in which every policy has something to decide, and what must hold.

Every two minutes from 23:46 to 00:58. The handler takes 150 s at 23:50, 200 s at 00:06 and 300 s at 00:24; all
nodes are down from 00:07:30 to 00:18:20, so that one job is cut off and others are missed.
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
TAKES = {"23:50": 150.0, "00:06": 200.0, "00:24": 300.0}
TICK = timedelta(microseconds=1)
WAITS = {"recover", "unheard"}  # holds that nothing in the scene ends by itself


def at(clock: str) -> datetime:
    """An instant of the scene: from noon on of 1 March, before noon of 2 March."""
    hour, minute, *second = map(int, clock.split(":"))
    return datetime(2027, 3, 1 if hour >= 12 else 2, hour, minute, *second, tzinfo=UTC)


def shown(instant: datetime) -> str:
    return f"{instant:%H:%M:%S}" if instant.second else f"{instant:%H:%M}"


START, DOWN, UP, OVER = at("23:45"), at("00:07:30"), at("00:18:20"), at("01:30")


@dataclass
class Try:
    """One call of the handler."""

    event: Arrived
    began: datetime
    ended: datetime | None = None


class Scene:
    """The scene played with some policy values."""

    def __init__(self, *values: Any) -> None:
        self.values = values
        self.tries: list[Try] = []
        self.paused: list[tuple[datetime, datetime, bool]] = []
        self.stopped: list[tuple[datetime, datetime]] = []
        self.options: dict[str, Any] = {"name": "s", "timezone": "UTC"}
        self.spec: Spec = GRID
        for value in values:
            self.options |= value.options
            self.spec = value.spec or self.spec
        self.does = {clock: does for value in values for clock, does in value.does.items()}
        self.deleted = False
        self.healed = 0

    def play(self) -> Scene:
        """From 23:45 to 01:30."""
        with World(start=START) as world:
            self.world = world
            self.app = world.new_app()
            self.app.queue("narrow", concurrency=1)
            self.app.queue("grouped", concurrency_per_group=1)
            self.app.on("other", timeout=3600)(lambda event: asyncio.sleep(100))
            heard = [value.heard_from for value in self.values if value.heard_from]
            if not heard:
                self.app.on("t")(self.handle)
            world.run(self._make())
            world.outage(DOWN, UP)
            acts = [(at(clock), act) for value in self.values for clock, act in value.acts.items()]
            acts += [(at(clock), Scene.listen) for clock in heard]
            for instant, act in sorted(acts, key=lambda one: one[0]):
                world.run(world.until(instant))
                world.run(act(self))
            world.run(world.until(OVER))
            world.run(self.heal())
            self.rows = world.run(self._rows())
            self.revisions = world.run(self.app.schedules.history(self.made.id))[::-1]
        return self

    async def _make(self) -> None:
        self.made = await self.app.schedule_repeat("t", self.spec, **self.options)
        if self.options.get("queue") == "narrow":  # somebody else is in the way at times
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
        one = Try(event, self.world.now)
        self.tries.append(one)
        try:
            nominal = event.scheduled_at
            clock = shown(nominal if not self.gridless else nominal.replace(minute=nominal.minute // 2 * 2, second=0))
            planned = event.occurrence_key.count(".") == 1
            if planned and clock in self.does:
                self.does[clock](event)
            await asyncio.sleep(TAKES.get(clock, 1) if planned and event.attempt == 1 else 1)
            return event.attempt
        finally:
            one.ended = self.world.now

    # What is done to the schedule.

    async def override(self, action: str, *clocks: str) -> None:
        for clock in clocks:
            if self.spec is GRID and not self.made.recurrence.has(at(clock)):
                continue  # a calendar or a bound leaves it out
            moved = [at(clock) + timedelta(minutes=1)] if action == "move" else []
            with suppress(Conflict):
                await getattr(self.app.schedules, action)(self.made.id, at(clock), *moved)

    async def undone(self, *clocks: str) -> None:
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

    async def recover(self) -> None:
        await self.app.schedules.recover(self.made.id)

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

    async def heal(self) -> None:
        self.healed += (await self.app.heal()).healed

    async def replay(self) -> None:
        for job in await self.app.list(schedule_id=self.made.id, status="failed"):
            await self.app.replay(job.id)

    # What came of it.

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
        """What became of each occurrence: `completed`, `skipped (overlap)`; with when it started, if it is late."""
        found = {}
        for job in self.rows:
            if job.kind is not kind:
                continue
            said = f"{job.state.value} ({job.reason})" if job.reason else job.state.value
            found[shown(job.scheduled_at)] = f"{said} ({job.hold})" if job.hold else said
        return found

    def starts(self, clock: str) -> list[str]:
        """When the attempts at a planned occurrence began."""
        found = {job.id for job in self.planned if shown(job.scheduled_at) == clock}
        return [shown(one.began) for one in self.tries if one.event.job_id in found]

    def expected(self) -> Counter[datetime]:
        """Each instant of each revision while it held."""
        found: Counter[datetime] = Counter()
        ends = [one.effective_at for one in self.revisions[1:]] + [OVER]
        for revision, end in zip(self.revisions, ends, strict=True):
            found.update(revision.recurrence.between(revision.effective_at + TICK, end + TICK))
        return found

    def check(self) -> None:
        """What must hold whatever the policies are."""
        self._each_occurrence_has_one_outcome()
        self._nothing_is_early_or_doubled()
        self._reasons_are_those_of_the_contract()
        self._nothing_is_stuck()
        assert self.healed == 0, "nothing was lost, and yet something was put right"
        self._pauses_never_fire()
        self._catch_up_is_bounded()
        self._what_expired_never_starts()
        if self.policies.overlap != "allow":
            self._one_at_a_time()
        if self.gridless:
            self._delays_are_kept()

    def _each_occurrence_has_one_outcome(self) -> None:
        assert all(job.skipped_count == 1 for job in self.rows)  # no more than 100 at once here
        found = Counter(job.scheduled_at for job in self.planned)
        assert set(found.values()) <= {1}, "an occurrence has two rows"
        if not self.gridless:
            expected = self.expected()
            assert expected, "it has occurrences at all"
            missing, extra = expected - found, found - expected
            assert not missing, f"no row: {[shown(one) for one in sorted(missing)]}"
            assert not extra, f"no occurrence: {[shown(one) for one in sorted(extra)]}"
        ran = {job.scheduled_at for job in self.planned if job.state is not JobState.SKIPPED}
        ran |= {job.scheduled_at for job in self.planned if job.reason == Reason.OVERRIDE}
        again = Counter(job.scheduled_at for job in self.rows if job.kind is Kind.BACKFILL)
        assert set(again.values()) <= {1}, "backfilled twice"
        assert not ran & set(again), "backfilled what had run or was left out on purpose"

    def _nothing_is_early_or_doubled(self) -> None:
        tries = Counter((one.event.occurrence_key, one.event.attempt) for one in self.tries)
        assert set(tries.values()) <= {1}, "an attempt was delivered twice"
        by_id = {job.id: job for job in self.rows}
        last: dict[str, int] = {}
        for one in self.tries:
            job = by_id[one.event.job_id]
            assert one.began >= one.event.scheduled_at, "early"
            only = job.state is JobState.COMPLETED and job.attempt == 1
            assert one.began >= job.run_at or not only, "earlier than it was to start"
            assert one.event.attempt > last.get(job.id, 0), "attempts rise"
            last[job.id] = one.event.attempt
        started = {one.event.job_id for one in self.tries}
        spread = any(at("00:50") < job.scheduled_at < job.run_at for job in self.planned)  # nothing else delays these
        bounded = self.gridless or self.deleted or self.made.recurrence.end or self.made.recurrence.max_runs
        assert bounded or not self.policies.jitter or spread
        for job in self.rows:
            assert job.state is not JobState.SKIPPED or job.id not in started, "skipped, and yet it was delivered"
            assert job.run_at >= job.scheduled_at, "to start before its time"
            heard = job.result != {"listeners": 0}
            assert job.state is not JobState.COMPLETED or not heard or job.id in started, "completed without running"

    def _reasons_are_those_of_the_contract(self) -> None:
        for job in self.rows:
            assert (job.state is JobState.SKIPPED) <= (job.reason in set(Reason)), job.reason
            assert (job.reason in set(Reason) - {Reason.EXPIRED}) <= (job.state is JobState.SKIPPED), job.reason

    def _nothing_is_stuck(self) -> None:
        live = [job for job in self.rows if job.state in (JobState.PENDING, JobState.RUNNING)]
        if any(job.hold in WAITS for job in live):
            return
        assert self.gridless or not live, f"still there: {[(shown(job.scheduled_at), job.hold) for job in live]}"
        assert not self.deleted or not live

    def _pauses_never_fire(self) -> None:
        for since, until, catch_up in self.paused:
            for job in self.planned:
                if since < job.scheduled_at <= until and not self.gridless and not catch_up:
                    reasons = {Reason.PAUSED, Reason.OVERRIDE}
                    assert (job.state, job.reason in reasons) == (JobState.SKIPPED, True), shown(job.scheduled_at)
        acts = {clock for value in self.values for clock in value.acts}
        for value, since, until in (("queue", "00:23", "00:33"), ("pause_all", "00:22", "00:30:20")):
            if {since, until} <= acts:
                for one in self.tries:
                    assert not at(since) < one.began < at(until), f"{value} was paused at {shown(one.began)}"

    def _catch_up_is_bounded(self) -> None:
        policies, late = self.policies, 0
        for job in self.planned:
            if not self.gridless and job.scheduled_at <= UP - timedelta(seconds=policies.missed_after):
                fired = job.scheduled_at > DOWN and job.state is not JobState.SKIPPED
                late += fired
                assert not fired or UP - job.scheduled_at <= timedelta(seconds=policies.catch_up_window)
        limit = {"skip": 0, "latest": 1, "all": policies.catch_up_limit}[policies.catch_up]
        assert late <= (0 if policies.lateness == "anchored" else limit)

    def _what_expired_never_starts(self) -> None:
        by_id = {job.id: job for job in self.rows}
        for one in self.tries:
            expires = by_id[one.event.job_id].expires_at
            assert expires is None or one.began < expires, "it started past its time"

    def _one_at_a_time(self) -> None:
        for before, after in pairwise(sorted(self.tries, key=lambda one: one.began)):
            assert before.ended is not None
            assert after.began >= before.ended, f"two at {shown(after.began)}"

    def _delays_are_kept(self) -> None:
        since_end = self.spec.since == "last_end"  # type: ignore[attr-defined]
        runs = [job for job in self.planned if job.state is not JobState.SKIPPED]
        for before, after in pairwise(runs):
            assert before.finished_at is not None, "the next came before the end"
            tries = [one for one in self.tries if one.event.job_id == before.id and one.began < after.scheduled_at]
            begun = tries[-1].began if tries else before.finished_at
            ended = tries[-1].ended if tries else before.finished_at  # a failed one may be replayed later
            assert ended is not None
            assert after.scheduled_at >= (ended if before.state is JobState.FAILED else before.finished_at)
            assert after.scheduled_at >= (ended if since_end else begun) + timedelta(minutes=2)


async def refused(scene: Scene) -> str:
    """The code with which a pair is refused."""
    try:
        await scene._make()
        for value in scene.values:
            for act in value.acts.values():
                await act(scene)
    except InvalidInput as no:
        return no.code
    return "not refused"
