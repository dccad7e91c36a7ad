"""What people do to a scheduler, in any order, and ask again where they got no answer."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.model.answers import Kept, Shot, Told
from tests.model.ledger import TIMEOUT, Ledger
from tests.model.plans import QUEUE, START, Drawn, Grid, limits, options, plans, retry, schedules, where
from tests.model.rows import Row, cursors, rows_of
from timebell import Retry
from timebell.errors import Conflict, NotFound, StoreUnreachable
from timebell.model.schedule import Schedule
from timebell.sim.world import World

TOPIC = "work"

some = st.integers(0, 9)
spans = st.sampled_from([1, 3, 10, 30, 70, 150, 400])
thens = st.sampled_from([0, 0, 1, 5, 20, 70])


class People(RuleBasedStateMachine):
    """Several real nodes on virtual time, those who use them, and what was answered."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        People.made += 1
        self.world = World(start=START)
        self.world.__enter__()
        self.ledger = Ledger(self.world)
        self.app = self.world.new_app()
        self.app.on(TOPIC, retry=Retry(**retry), timeout=TIMEOUT)(self.ledger.handle)
        self.shots: dict[str, Shot] = {}
        self.kept: list[Kept] = []
        self.told: dict[str, Told] = {}
        self.replaced: dict[str, tuple[str, int]] = {}
        """What was moved: to which job, and after how many calls."""
        self.moved: dict[str, datetime] = {}
        """What stands for a moved job, and to when; a person may also ask for an earlier time."""
        self.replayed: set[str] = set()
        self.discarded = False
        self.halted: dict[str, datetime] = {}
        """Queues that are paused, since when; `*` is everything."""
        self.halts: list[tuple[str, datetime, datetime]] = []
        """The pauses of queues that are over."""
        self.waiting: dict[tuple[str, str | None, datetime], datetime] = {}
        """What may start and has not, and since when this is seen."""
        self.named = 0
        self.harmed = False
        self.away_until = START
        self.stepped = START - timedelta(days=1)
        """When the clock jumped last."""

    @initialize(nodes=st.sampled_from([2, 2, 3, 1]), limits=limits, first=schedules, second=schedules, plan=plans)
    def begin(self, nodes: int, limits: dict[str, Any], first: Drawn, second: Drawn, plan: dict[str, Any]) -> None:
        """The nodes start, and have something to do."""
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
        """What a caller gets who asks again until there is an answer; None if the database is away from the start."""
        asked = False
        while True:
            try:
                return self.world.run(verb())
            except StoreUnreachable:  # away, the answer was lost, or the transaction of a handler is in the way
                if self.world.database.away and not asked:
                    return None
            asked = True
            if self.world.database.away:
                self.then(5)

    @rule(
        plan=plans, after=st.sampled_from([0, 0, 2, 20, 200]), request=st.booleans(), where=where, then=thens
    )  # fmt: skip
    def create(self, plan: dict[str, Any], after: int, request: bool, where: dict[str, Any], then: int) -> None:
        """A one-shot; perhaps the same request twice."""
        self.named += 1
        request_id = f"request-{self.named}"
        run_at = self.world.now + timedelta(seconds=after)

        def verb() -> Any:
            return self.app.schedule_at(
                TOPIC, run_at, payload=plan, client_request_id=request_id, on_conflict="keep", **where
            )  # fmt: skip

        job = self.ask(verb)
        if job is None:
            return
        self.shots[job.id] = Shot(job.id, run_at, request_id)
        if request:
            again = self.ask(verb)
            assert again is None or again.id == job.id, f"request: {request_id} made {job.id} and {again.id}"
        self.then(then)

    @rule(one=schedules)
    def create_schedule(self, one: Drawn) -> None:
        """A schedule; no more than a few, so that what is done meets the same ones."""
        grid = one[2]
        if sum(one.deleted is None for one in self.kept) >= 3:
            return
        self.named += 1
        name = f"schedule-{self.named}"
        given = options(one, grid)
        made = self.ask(lambda: self.app.schedule_repeat(TOPIC, grid.spec(), name=name, replace=True, **given))
        if made is not None:
            overlap = given.get("overlap", "skip")
            self.kept.append(Kept(made.id, name, made.created_at, [(made.created_at, grid)], {overlap}, [given]))

    def pick(self, which: int) -> Kept | None:
        """A schedule that is there."""
        moments = cursors(self.world)
        there = [one for one in self.kept if one.deleted is None and not (one.wounded and moments[one.id][0] is None)]
        return there[which % len(there)] if there else None

    @rule(which=some, to=schedules)
    def update(self, which: int, to: Drawn) -> None:
        """Another spec under the same name. A fixed delay stays one: what it turns into has no instants to count."""
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
                one.beside_until = made.updated_at
            one.overlaps.add(given.get("overlap", "skip"))

    def changed(self, one: Kept, grid: Grid, made: Schedule) -> None:
        """What holds from now on, with the moves that the answer names."""
        moves = [(at.at, at.to) for at in made.recurrence.overrides if at.to is not None]
        one.grids.append((made.updated_at, replace(grid, moves=tuple(moves))))

    @rule(which=some, then=st.sampled_from([0, 30, 300]), catch_up=st.sampled_from([None, False, False, True]))
    def pause(self, which: int, then: int, catch_up: bool | None) -> None:
        """Fire nothing more; perhaps for a while only."""
        one = self.pick(which)
        if one is not None and self.ask(lambda: self.app.schedules.pause(one.id)):
            if not one.pauses or one.pauses[-1][1] is not None:
                one.pauses.append([self.world.now, None, None])
            self.then(then)
            if catch_up is not None:
                self.resume(one, catch_up)

    @rule(which=some, catch_up=st.booleans())
    def go_on(self, which: int, catch_up: bool) -> None:
        """Fire again."""
        if (one := self.pick(which)) is not None:
            self.resume(one, catch_up)

    def resume(self, one: Kept, catch_up: bool) -> None:
        """Fire again."""
        resumed = self.ask(lambda: self.app.schedules.resume(one.id, catch_up=catch_up))
        if resumed and one.pauses and one.pauses[-1][1] is None:
            one.pauses[-1][1:] = [self.world.now, self.world.now if catch_up else None]

    @rule(which=some, times=st.integers(1, 2))
    def trigger(self, which: int, times: int) -> None:
        """One more run now, or two in the same instant."""
        one = self.pick(which)
        for _ in range(times):
            if one is not None and self.ask(lambda: self.app.schedules.trigger(one.id)):
                one.triggers += 1

    @rule(which=some, back=spans, overlap=st.sampled_from([None, None, "allow"]))
    def backfill(self, which: int, back: int, overlap: str | None) -> None:
        """Run what was skipped lately."""
        one, now = self.pick(which), self.world.now
        if one is not None:
            since, fill = now - timedelta(seconds=back), self.app.schedules.backfill
            if self.ask(lambda: fill(one.id, since, now, overlap=overlap)) and overlap == "allow":
                one.beside_until = self.world.now

    @rule(which=some, nth=st.sampled_from([0, 0, 1]), by=st.sampled_from([0, 2, 31]))
    def override(self, which: int, nth: int, by: int) -> None:
        """Leave out one of the next occurrences, or move it by some seconds."""
        one = self.pick(which)
        if one is None or one.grids[-1][1].kind == "delay" or one.wounded:
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
        """Put an occurrence back that was moved."""
        one, now = self.pick(which), self.world.now
        if one is None or one.wounded:
            return
        grid = one.grids[-1][1]
        if to_come := [at for at, to in grid.moves if at > now]:
            try:
                made = self.ask(lambda: self.app.schedules.undo(one.id, to_come[0]))
            except NotFound:  # done, and the answer was lost
                made = self.world.run(self.app.schedules.get(one.id))
            if made is not None:
                self.changed(one, grid, made)

    @rule(which=some)
    def delete(self, which: int) -> None:
        """Forget a schedule."""
        one = self.pick(which)
        if one is None:
            return
        try:
            if self.ask(lambda: self.app.schedules.delete(one.id)) is None:
                return
        except NotFound:
            pass  # the first time it was done, and the answer was lost
        one.deleted = self.world.now

    def rows(self) -> list[Row]:
        """Every job, live and finished."""
        return rows_of(self.world)

    def live(self, which: int, state: str) -> Row | None:
        """A job that is not over."""
        rows = [row for row in self.rows() if row.state == state]
        return rows[which % len(rows)] if rows else None

    @rule(which=some, state=st.sampled_from(["pending", "running"]), again=st.booleans(), then=thens)
    def cancel(self, which: int, state: str, again: bool, then: int) -> None:
        """Cancel a job, and perhaps ask again."""
        row = self.live(which, state)
        for _ in range(1 + again if row is not None else 0):
            done = self.ask(lambda: self.app.cancel(row.id))
            if done is None:
                return
            told = Told(done.outcome.value, self.world.now, done.job.attempt, len(self.ledger.of[row.id]))
            first = self.told.setdefault(row.id, told)
            assert first.outcome == told.outcome, f"cancel: {row.id} was {first.outcome}, now {told.outcome}"
        self.then(then)

    @rule(which=some, after=st.sampled_from([0, 15, 120]))
    def reschedule(self, which: int, after: int) -> None:
        """Another time for a job that waits."""
        row, at = self.live(which, "pending"), self.world.now + timedelta(seconds=after)
        if row is None:
            return
        try:
            new = self.ask(lambda: self.app.reschedule(row.id, at))
        except Conflict as conflict:
            if conflict.code == "JOB_IN_FLIGHT":
                return
            moved = next(one for one in self.rows() if one.replaces == row.id)  # done, and the answer was lost
            new = self.world.run(self.app.get(moved.id))
        if new is None:
            return
        self.replaced[row.id] = new.id, len(self.ledger.of[row.id])
        self.moved[new.id] = at
        if row.id in self.shots:
            self.shots[new.id] = Shot(new.id, at, None)

    @rule(which=some)
    def replay(self, which: int) -> None:
        """Try a dead letter again."""
        failed = [row for row in self.rows() if row.state == "failed"]
        if failed:
            id_ = failed[which % len(failed)].id
            if self.ask(lambda: self.app.replay(id_)):
                self.replayed.add(id_)
                self.told.pop(id_, None)

    @rule(discard=st.booleans())
    def recover(self, discard: bool) -> None:
        """Let the large backlogs go."""
        if self.ask(lambda: self.app.schedules.recover(discard=discard)) and discard:
            self.discarded = True

    @rule(queue=st.sampled_from([QUEUE, "*"]), then=st.sampled_from([0, 10, 70]), on=st.booleans())
    def halt(self, queue: str, then: int, on: bool) -> None:
        """Stop a queue, or everything; perhaps for a while only."""
        app = self.app
        done = self.ask(lambda: self.said(app.pause_all() if queue == "*" else app.pause_queue(queue)))
        if done and queue not in self.halted:
            self.halted[queue] = self.world.now
        self.then(then)
        if on:
            self.let_go(queue)

    @rule(queue=st.sampled_from([QUEUE, "*"]))
    def let_go(self, queue: str) -> None:
        """Let a queue go on, or everything."""
        if queue not in self.halted:
            return
        app = self.app
        if self.ask(lambda: self.said(app.resume_all() if queue == "*" else app.resume_queue(queue))):
            self.halts.append((queue, self.halted.pop(queue), self.world.now))

    async def said(self, verb: Coroutine[Any, Any, None]) -> bool:
        """That a verb without an answer was done."""
        await verb
        return True
