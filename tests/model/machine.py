"""The model: people and all that befalls their nodes, in any order; see docs/internals/proof.md."""

from __future__ import annotations

from datetime import datetime, timedelta

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from tests.model import invariants
from tests.model.people import People, some, spans, thens
from tests.model.plans import START
from timebell.sim.database import POINTS

NAMES = ["node-1", "node-2", "node-3", "node-4"]
AIMS = [f"{name}.{point}" for name, count in POINTS.items() for point in [*range(1, count + 1), "commit", "done"]]
AIMS = [aim for aim in AIMS if not aim.endswith(".commit") or POINTS[aim.split(".")[0]] > 1]
ASKED = ["create", "cancel", "put", "pause", "resume", "delete", "reschedule"]


class Machine(People):
    """Those, time, and faults; after every step all must be as it may be."""

    # Time

    @rule(dt=spans)
    def advance(self, dt: int) -> None:
        """Let time pass."""
        self.then(dt)

    @rule(dt=st.sampled_from([1, 5, 19, 20, 21]))
    def wait(self, dt: int) -> None:
        """Let a little time pass."""
        self.then(dt)

    # What befalls the nodes

    def node(self, which: int, busy: bool) -> str | None:
        """A node; one that runs a handler, if there is such a one and it is asked for."""
        nodes = self.world.nodes
        running = [one.node for one in self.ledger.open if one.node in nodes] if busy else []
        return (running or nodes)[which % len(running or nodes)] if nodes else None

    @rule(which=some, busy=st.booleans(), down=st.sampled_from([1, 30, 300]), then=thens)
    def crash(self, which: int, busy: bool, down: int, then: int) -> None:
        """A node is killed."""
        if (name := self.node(which, busy)) is not None:
            self.world.crash(name, down=down)
            self.then(then)

    @rule(down=st.sampled_from([5, 90, 700]))
    def crash_all(self, down: int) -> None:
        """All nodes are killed, and nobody sees what comes due."""
        self.world.crash(down=down)
        self.then(down)

    @rule(at=st.sampled_from(AIMS), down=st.sampled_from([1, 30, 100]))
    def crash_at(self, at: str, down: int) -> None:
        """The first node that gets to a point is killed there."""
        self.world.crash(at=at, down=down)

    @rule(at=st.sampled_from(AIMS))
    def break_at(self, at: str) -> None:
        """The first node that gets to a point hears nothing from the database."""
        self.world.disconnect(at=at)

    @rule(which=some, busy=st.booleans(), dt=st.sampled_from([3, 17, 25, 60]), then=thens)
    def freeze(self, which: int, busy: bool, dt: int, then: int) -> None:
        """A node stands still."""
        if (name := self.node(which, busy)) is not None:
            self.world.freeze(name, dt)
            self.then(then)

    @rule(at=st.sampled_from([aim for aim in AIMS if aim.endswith(".done")]), dt=st.sampled_from([17, 60]))
    def freeze_at(self, at: str, dt: int) -> None:
        """The first node that gets to a point stands still right there."""
        self.world.freeze(None, dt, at=at)

    @rule(which=some, busy=st.booleans(), dt=st.sampled_from([3, 17, 25, 60]), then=thens)
    def cut(self, which: int, busy: bool, dt: int, then: int) -> None:
        """A node is kept from the database, and goes on."""
        if (name := self.node(which, busy)) is not None:
            self.world.cut(name, dt)
            self.then(then)

    @rule(dt=st.sampled_from([2, 17, 90, 300]))
    def away(self, dt: int) -> None:
        """The database is away."""
        now = self.world.now
        if now >= self.away_until:
            self.away_until = now + timedelta(seconds=dt)
            self.world.outage(now, self.away_until, of="database")
            self.world.run(self.world.advance())

    @rule(dt=st.sampled_from([20, 90]))
    def deafen(self, dt: int) -> None:
        """Nodes hear nothing of what others write."""
        self.world.deafen(dt)

    @rule(at=st.sampled_from(ASKED))
    def lose_answer(self, at: str) -> None:
        """The answer to the next such question does not arrive."""
        self.world.disconnect("client", at=f"{at}.done")

    @precondition(lambda self: self.nodes > 1)
    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        """A node more."""
        if name not in self.world.nodes and not self.world.database.away and name not in self.world.expected:
            self.world.run(self.world.join(name))

    @precondition(lambda self: len(self.world.nodes) > 1)
    @rule(which=some)
    def leave(self, which: int) -> None:
        """A node drains and ends."""
        name = self.world.nodes[which % len(self.world.nodes)]
        if not self.ledger.befell(name, self.world.now, self.world.now):
            self.ledger.left.append((self.world.now, name))
            self.world.run(self.world.leave(name))
            self.ledger.left.append((self.world.now, name))

    @rule(which=some, how=st.sampled_from(["next", "turn", "word"]))
    def wound(self, which: int, how: str) -> None:
        """Somebody's SQL: a schedule without its next instant, a job that waits for a turn, or for nothing."""
        one, now = self.pick(which), self.world.now
        self.harmed = True
        with self.world.connect() as connection:
            if how == "next" and one is not None and one.grids[-1][1].kind != "delay" and not one.pauses:
                if all(at + timedelta(seconds=1) < now for at, _ in one.grids):
                    sql = "UPDATE timebell_schedules SET next_fire_at = NULL WHERE id = ? AND next_fire_at > ?"
                    late = int((now - datetime(1970, 1, 1, tzinfo=now.tzinfo)).total_seconds() * 1e6)
                    one.wounded = connection.exec_driver_sql(sql, (one.id, late)).rowcount > 0
            elif how != "next":
                hold = "overlap" if how == "turn" else "nonsense"
                where = "schedule_id IS NULL" if how == "turn" else "hold IS NULL"
                connection.exec_driver_sql(
                    f"UPDATE timebell_jobs SET hold = ? WHERE state = 'pending' AND {where}", (hold,)
                )

    # What must hold

    @invariant()
    def all_holds(self) -> None:
        """After every step."""
        if self.world.begun:
            invariants.check(self)

    def teardown(self) -> None:
        """Heal, let time pass, and see that nothing is left behind."""
        try:
            if self.world.begun:
                self.heal()
                invariants.check(self)
                invariants.at_the_end(self)
                self.audit()
        finally:
            self.world.__exit__()

    def audit(self) -> None:
        """The product's own audit agrees."""
        audit = self.world.run(self.app.audit(START, self.world.now))
        assert not audit.differences, f"audit: {audit.differences[:3]}"

    def heal(self) -> None:
        """All faults end, and nodes are there."""
        world = self.world
        world.heal()
        world.restless = self.harmed
        for queue in list(self.halted):
            self.let_go(queue)
        if self.nodes > 1 and not world.nodes and not world.expected:
            world.run(world.join("node-1"))
        world.run(world.advance(seconds=150))
