"""Actions of clients in any order, repeated when no response arrived."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import datetime, timedelta
from random import Random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.model.inputs import QUEUE, START, Drawn, Grid, limits, options, plans, retry, schedules, where
from tests.model.ledger import TIMEOUT, Ledger
from tests.model.records import CancelRecord, JobRecord, ScheduleRecord
from tests.model.rows import Row, cursors, rows_of
from timebell import Retry
from timebell.errors import Conflict, NotFound, StoreUnreachable
from timebell.model.schedule import Schedule
from timebell.sim.world import World

TOPIC = "work"
LATENCIES = [0.0, 0.0, 0.001, 0.002, 0.005, 0.02, 0.05]
"""Seconds that a request or a reply takes."""

some = st.integers(0, 9)
spans = st.sampled_from([1, 3, 10, 30, 70, 150, 400])
thens = st.sampled_from([0, 0, 1, 5, 20, 70])


class Clients(RuleBasedStateMachine):
    """Real nodes on virtual time, client actions, and records of acknowledged calls."""

    made = 0
    interleaving = 0

    def __init__(self) -> None:
        super().__init__()
        Clients.made += 1
        self.world = World(start=START)
        self.world.__enter__()
        self.ledger = Ledger(self.world)
        self.app = self.world.new_app()
        self.app.on(TOPIC, retry=Retry(**retry), timeout=TIMEOUT)(self.ledger.handle)
        self.one_time_jobs: dict[str, JobRecord] = {}
        self.schedules: list[ScheduleRecord] = []
        self.cancels: dict[str, CancelRecord] = {}
        self.replaced: dict[str, tuple[str, int]] = {}
        """Rescheduled jobs: the new job, and the number of handler calls before."""
        self.moved: dict[str, datetime] = {}
        """Jobs that replace rescheduled ones, with the new time, which may be earlier."""
        self.retried: set[str] = set()
        self.discarded = False
        self.paused_queues: dict[str, datetime] = {}
        """Paused queues with the start of the pause; `*` is everything."""
        self.queue_pauses: list[tuple[str, datetime, datetime]] = []
        """Past pauses of queues."""
        self.waiting: dict[tuple[str, str | None, datetime], datetime] = {}
        """Startable rows that have not started, with the instant at which this was first observed."""
        self.name_count = 0
        self.rows_damaged = False
        self.away_until = START
        self.claim_delay = timedelta(0)
        """The longest time from the instant at which a node claims until it starts the job."""
        self.write_delay = timedelta(0)
        """The longest time from the end of a handler until its completion is in the database."""
        self.clock_stepped_at = START - timedelta(days=1)
        """The last step of the clock."""

    @initialize(
        nodes=st.sampled_from([2, 2, 3, 1]), limits=limits, first=schedules, second=schedules, plan=plans,
        interleaving=st.integers(0, 2**16),
    )  # fmt: skip
    def begin(
        self, nodes: int, limits: dict[str, Any], first: Drawn, second: Drawn, plan: dict[str, Any],
        interleaving: int,
    ) -> None:  # fmt: skip
        """Start the nodes and create work for them; an interleaving other than 0 varies the order of operations."""
        if interleaving:
            random = Random(interleaving)
            self.world.delay_requests(lambda: random.choice(LATENCIES))
            self.claim_delay = timedelta(seconds=2 * max(LATENCIES))
            self.write_delay = 3 * self.claim_delay
        self.nodes, self.limits = nodes, limits
        self.app.queue(QUEUE, **limits)
        self.world.run(self.world.start(nodes=nodes))
        with self.world.connect() as connection:
            connection.exec_driver_sql("CREATE TABLE written (job TEXT)")
        self.create_schedule(first)
        self.create_schedule(second)
        self.create(plan, 2, False, {}, 0)

    def then(self, seconds: float) -> None:
        """Let time pass."""
        self.world.run(self.world.advance(seconds=seconds))

    def ask(self, verb: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Repeat a call until a response arrives; return it, or None if the database was down from the start."""
        asked = False
        while True:
            try:
                return self.world.run(verb())
            except StoreUnreachable:  # down, the response was lost, or a handler's transaction holds the lock
                if self.world.database.is_down and not asked:
                    return None
            except ValueError:  # a row that was damaged by SQL is not repaired yet
                if not self.rows_damaged:
                    raise
                return None
            asked = True
            if self.world.database.is_down:
                self.then(5)

    @rule(
        plan=plans, after=st.sampled_from([0, 0, 2, 20, 200]), request=st.booleans(), where=where, then=thens
    )  # fmt: skip
    def create(self, plan: dict[str, Any], after: int, request: bool, where: dict[str, Any], then: int) -> None:
        """Create a one-time job, perhaps with a repeated request."""
        self.name_count += 1
        request_id = f"request-{self.name_count}"
        run_at = self.world.now + timedelta(seconds=after)

        def verb() -> Any:
            return self.app.schedule_at(
                TOPIC, run_at, payload=plan, client_request_id=request_id, on_conflict="keep", **where
            )  # fmt: skip

        job = self.ask(verb)
        if job is None:
            return
        self.one_time_jobs[job.id] = JobRecord(job.id, run_at, request_id)
        if request:
            again = self.ask(verb)
            assert again is None or again.id == job.id, f"request: {request_id} created {job.id} and {again.id}"
        self.then(then)

    @rule(one=schedules)
    def create_schedule(self, one: Drawn) -> None:
        """Create a schedule; only a few, so that actions meet the same ones."""
        grid = one[2]
        if sum(one.deleted is None for one in self.schedules) >= 3:
            return
        self.name_count += 1
        name = f"schedule-{self.name_count}"
        given = options(one, grid)
        made = self.ask(lambda: self.app.schedule_repeat(TOPIC, grid.spec(), name=name, replace=True, **given))
        if made is not None:
            overlap = given.get("overlap", "skip")
            self.schedules.append(
                ScheduleRecord(made.id, name, made.created_at, [(made.created_at, grid)], {overlap}, [given])
            )

    def pick(self, which: int) -> ScheduleRecord | None:
        """Return an existing schedule."""
        moments = cursors(self.world)
        there = [
            one for one in self.schedules if one.deleted is None and not (one.damaged and moments[one.id][0] is None)
        ]
        return there[which % len(there)] if there else None

    @rule(which=some, to=schedules)
    def update(self, which: int, to: Drawn) -> None:
        """Upsert another spec. A fixed delay remains one, because its instants cannot be counted after a change."""
        one, grid = self.pick(which), to[2]
        if one is None:
            return
        was = one.grids[-1][1]
        if (was.kind == "delay") != (grid.kind == "delay"):
            grid = Grid(was.kind, grid.step)
        given = options(to, grid)
        made = self.ask(lambda: self.app.schedule_repeat(TOPIC, grid.spec(), name=one.name, replace=True, **given))
        if made is not None:
            self.changed(one, grid, made)
            one.given.append(given)
            if "allow" in one.overlaps:
                one.concurrent_until = made.updated_at
            one.overlaps.add(given.get("overlap", "skip"))

    def changed(self, one: ScheduleRecord, grid: Grid, made: Schedule) -> None:
        """Record the new spec with the moves in the response."""
        moves = [(at.at, at.to) for at in made.recurrence.overrides if at.to is not None]
        one.grids.append((made.updated_at, replace(grid, moves=tuple(moves))))

    @rule(which=some, then=st.sampled_from([0, 30, 300]), catch_up=st.sampled_from([None, False, False, True]))
    def pause(self, which: int, then: int, catch_up: bool | None) -> None:
        """Pause a schedule, perhaps for a limited time."""
        one = self.pick(which)
        if one is not None and self.ask(lambda: self.app.schedules.pause(one.id)):
            if not one.pauses or one.pauses[-1][1] is not None:
                one.pauses.append([self.world.now, None, None])
            self.then(then)
            if catch_up is not None:
                self.resume(one, catch_up)

    @rule(which=some, catch_up=st.booleans())
    def go_on(self, which: int, catch_up: bool) -> None:
        """Resume a schedule."""
        if (one := self.pick(which)) is not None:
            self.resume(one, catch_up)

    def resume(self, one: ScheduleRecord, catch_up: bool) -> None:
        """Resume a schedule."""
        resumed = self.ask(lambda: self.app.schedules.resume(one.id, catch_up=catch_up))
        if resumed and one.pauses and one.pauses[-1][1] is None:
            one.pauses[-1][1:] = [self.world.now, self.world.now if catch_up else None]

    @rule(which=some, times=st.integers(1, 2))
    def trigger(self, which: int, times: int) -> None:
        """Trigger one run now, or two at the same instant."""
        one = self.pick(which)
        for _ in range(times):
            if one is not None and self.ask(lambda: self.app.schedules.trigger(one.id)):
                one.triggers += 1

    @rule(which=some, back=spans, overlap=st.sampled_from([None, None, "allow"]))
    def backfill(self, which: int, back: int, overlap: str | None) -> None:
        """Backfill a recent period."""
        one, now = self.pick(which), self.world.now
        if one is not None:
            since, fill = now - timedelta(seconds=back), self.app.schedules.backfill
            if self.ask(lambda: fill(one.id, since, now, overlap=overlap)) and overlap == "allow":
                one.concurrent_until = self.world.now

    @rule(which=some, nth=st.sampled_from([0, 0, 1]), by=st.sampled_from([0, 2, 31]))
    def override(self, which: int, nth: int, by: int) -> None:
        """Skip one of the next occurrences, or move it by some seconds."""
        one = self.pick(which)
        if one is None or one.grids[-1][1].kind == "delay" or one.damaged:
            return
        now, grid, verbs = self.world.now, one.grids[-1][1], self.app.schedules
        at = grid.between(now, now + timedelta(seconds=600), one.made)[nth]
        to = at + timedelta(seconds=by)
        if by and to in grid.between(at, to, one.made):
            return
        made = self.ask(lambda: verbs.move(one.id, at, to) if by else verbs.skip(one.id, at))
        if made is not None:
            self.changed(one, grid, made)
            moved = one.grids[-1][1].moves
            assert not by or to in [there for _, there in moved], f"moved: {at} to {to} is not in {moved}"

    @rule(which=some)
    def undo(self, which: int) -> None:
        """Undo the move of an occurrence."""
        one, now = self.pick(which), self.world.now
        if one is None or one.damaged:
            return
        grid = one.grids[-1][1]
        if to_come := [at for at, to in grid.moves if at > now]:
            try:
                made = self.ask(lambda: self.app.schedules.undo(one.id, to_come[0]))
            except NotFound:  # done, but the response was lost
                made = self.world.run(self.app.schedules.get(one.id))
            if made is not None:
                self.changed(one, grid, made)

    @rule(which=some)
    def delete(self, which: int) -> None:
        """Delete a schedule."""
        one = self.pick(which)
        if one is None:
            return
        try:
            if self.ask(lambda: self.app.schedules.delete(one.id)) is None:
                return
        except NotFound:
            pass  # done by the first call, whose response was lost
        one.deleted = self.world.now

    def rows(self) -> list[Row]:
        """Return all jobs, live and finished."""
        return rows_of(self.world)

    def live(self, which: int, state: str) -> Row | None:
        """Return a live job."""
        rows = [row for row in self.rows() if row.state == state]
        return rows[which % len(rows)] if rows else None

    @rule(which=some, state=st.sampled_from(["pending", "running"]), again=st.booleans(), then=thens)
    def cancel(self, which: int, state: str, again: bool, then: int) -> None:
        """Cancel a job, perhaps twice."""
        row = self.live(which, state)
        for _ in range(1 + again if row is not None else 0):
            done = self.ask(lambda: self.app.cancel(row.id))
            if done is None:
                return
            result = CancelRecord(done.outcome.value, self.world.now, done.job.attempt, len(self.ledger.by_job[row.id]))
            first = self.cancels.setdefault(row.id, result)
            assert first.outcome == result.outcome, f"cancel: {row.id} was {first.outcome}, now {result.outcome}"
        self.then(then)

    @rule(which=some, after=st.sampled_from([0, 15, 120]))
    def reschedule(self, which: int, after: int) -> None:
        """Reschedule a pending job."""
        row, at = self.live(which, "pending"), self.world.now + timedelta(seconds=after)
        if row is None:
            return
        try:
            new = self.ask(lambda: self.app.reschedule(row.id, at))
        except Conflict as conflict:
            if conflict.code == "JOB_IN_FLIGHT":
                return
            moved = next(one for one in self.rows() if one.replaces == row.id)  # done, but the response was lost
            new = self.world.run(self.app.get(moved.id))
        if new is None:
            return
        self.replaced[row.id] = new.id, len(self.ledger.by_job[row.id])
        self.moved[new.id] = at
        if row.id in self.one_time_jobs:
            self.one_time_jobs[new.id] = JobRecord(new.id, at, None)

    @rule(which=some)
    def replay(self, which: int) -> None:
        """Retry a dead letter."""
        failed = [row for row in self.rows() if row.state == "failed"]
        if failed:
            id_ = failed[which % len(failed)].id
            if self.ask(lambda: self.app.retry(id_)):
                self.retried.add(id_)
                self.cancels.pop(id_, None)

    @rule(discard=st.booleans())
    def recover(self, discard: bool) -> None:
        """Release or discard held backlogs."""
        if self.ask(lambda: self.app.schedules.release(discard=discard)) and discard:
            self.discarded = True

    @rule(queue=st.sampled_from([QUEUE, "*"]), then=st.sampled_from([0, 10, 70]), on=st.booleans())
    def halt(self, queue: str, then: int, on: bool) -> None:
        """Pause a queue or everything, perhaps for a limited time."""
        app = self.app
        done = self.ask(lambda: self.returning_true(app.pause_all() if queue == "*" else app.pause_queue(queue)))
        if done and queue not in self.paused_queues:
            self.paused_queues[queue] = self.world.now
        self.then(then)
        if on:
            self.let_go(queue)

    @rule(queue=st.sampled_from([QUEUE, "*"]))
    def let_go(self, queue: str) -> None:
        """Resume a queue or everything."""
        if queue not in self.paused_queues:
            return
        app = self.app
        if self.ask(lambda: self.returning_true(app.resume_all() if queue == "*" else app.resume_queue(queue))):
            self.queue_pauses.append((queue, self.paused_queues.pop(queue), self.world.now))
            self.waiting = {}  # what waited before the pause has to wait no longer from now on

    async def returning_true(self, verb: Coroutine[Any, Any, None]) -> bool:
        """Await a call without result and return True."""
        await verb
        return True
