"""The state machine: actions of clients and faults of nodes in any order; see docs/internals/proof.md."""

from __future__ import annotations

from datetime import datetime, timedelta

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from tests.model import invariants
from tests.model.clients import Clients, some, spans, thens
from tests.model.inputs import START
from timebell.sim.database import FAULT_POINTS

STEPS = 30
NAMES = ["node-1", "node-2", "node-3", "node-4"]
FAULT_POINT_NAMES = [
    f"{name}.{point}" for name, count in FAULT_POINTS.items() for point in [*range(1, count + 1), "commit", "done"]
]
FAULT_POINT_NAMES = [
    aim for aim in FAULT_POINT_NAMES if not aim.endswith(".commit") or FAULT_POINTS[aim.split(".")[0]] > 1
]
CLIENT_OPERATIONS = [
    "create", "cancel", "upsert_schedule", "pause_schedule", "resume_schedule", "delete_schedule", "reschedule",
]  # fmt: skip


class Machine(Clients):
    """Adds time and faults to the clients, and checks all invariants after every step."""

    # Time

    @rule(dt=spans)
    def advance(self, dt: int) -> None:
        """Let time pass."""
        self.then(dt)

    @rule(dt=st.sampled_from([1, 5, 19, 20, 21]))
    def wait(self, dt: int) -> None:
        """Let a little time pass."""
        self.then(dt)

    # Faults of nodes

    def node(self, which: int, busy: bool) -> str | None:
        """Return a node; with `busy`, one that runs a handler if possible."""
        nodes = self.world.nodes
        running = [one.node for one in self.ledger.open if one.node in nodes] if busy else []
        return (running or nodes)[which % len(running or nodes)] if nodes else None

    @rule(which=some, busy=st.booleans(), down=st.sampled_from([1, 30, 300]), then=thens)
    def crash(self, which: int, busy: bool, down: int, then: int) -> None:
        """Kill a node."""
        if (name := self.node(which, busy)) is not None:
            self.world.crash(name, down=down)
            self.then(then)

    @rule(down=st.sampled_from([5, 90, 700]))
    def crash_all(self, down: int) -> None:
        """Kill all nodes; jobs become due while none runs."""
        self.world.crash(down=down)
        self.then(down)

    @rule(at=st.sampled_from(FAULT_POINT_NAMES), down=st.sampled_from([1, 30, 100]))
    def crash_at(self, at: str, down: int) -> None:
        """Kill the first node that reaches a fault point."""
        self.world.crash(at=at, down=down)

    @rule(at=st.sampled_from(FAULT_POINT_NAMES))
    def break_at(self, at: str) -> None:
        """Break the connection of the first node that reaches a fault point."""
        self.world.disconnect(at=at)

    @rule(which=some, busy=st.booleans(), dt=st.sampled_from([3, 17, 25, 60]), then=thens)
    def freeze(self, which: int, busy: bool, dt: int, then: int) -> None:
        """Freeze a node."""
        if (name := self.node(which, busy)) is not None:
            self.world.freeze(name, dt)
            self.then(then)

    @rule(at=st.sampled_from([aim for aim in FAULT_POINT_NAMES if aim.endswith(".done")]), dt=st.sampled_from([17, 60]))
    def freeze_at(self, at: str, dt: int) -> None:
        """Freeze the first node that reaches a fault point."""
        self.world.freeze(None, dt, at=at)

    @rule(which=some, busy=st.booleans(), dt=st.sampled_from([3, 17, 25, 60]), then=thens)
    def cut(self, which: int, busy: bool, dt: int, then: int) -> None:
        """Cut a running node off from the database."""
        if (name := self.node(which, busy)) is not None:
            self.world.cut(name, dt)
            self.then(then)

    @rule(dt=st.sampled_from([2, 17, 90, 300]))
    def away(self, dt: int) -> None:
        """Take the database down."""
        now = self.world.now
        if now >= self.away_until:
            self.away_until = now + timedelta(seconds=dt)
            self.world.outage(now, self.away_until, of="database")
            self.world.run(self.world.advance())

    @rule(dt=st.sampled_from([20, 90]))
    def deafen(self, dt: int) -> None:
        """Mute notifications between nodes."""
        self.world.mute_notifications(dt)

    @rule(at=st.sampled_from(CLIENT_OPERATIONS))
    def lose_answer(self, at: str) -> None:
        """Lose the response to the next call of this operation."""
        self.world.disconnect("client", at=f"{at}.done")

    @precondition(lambda self: self.nodes > 1)
    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        """Add a node."""
        if name not in self.world.nodes and not self.world.database.is_down and name not in self.world.restarting_nodes:
            self.world.run(self.world.add_node(name))

    @precondition(lambda self: len(self.world.nodes) > 1)
    @rule(which=some)
    def leave(self, which: int) -> None:
        """Drain a node."""
        name = self.world.nodes[which % len(self.world.nodes)]
        if not self.ledger.had_fault(name, self.world.now, self.world.now):
            self.ledger.drains.append((self.world.now, name))
            self.world.run(self.world.drain_node(name))
            self.ledger.drains.append((self.world.now, name))

    @rule(which=some, how=st.sampled_from(["next", "turn", "word"]))
    def wound(self, which: int, how: str) -> None:
        """Damage rows by SQL: a schedule without next instant, or a job with an orphaned or invalid hold."""
        one, now = self.pick(which), self.world.now
        self.rows_damaged = True
        with self.world.connect() as connection:
            if how == "next" and one is not None and one.grids[-1][1].kind != "delay" and not one.pauses:
                if all(at + timedelta(seconds=1) < now for at, _ in one.grids):
                    sql = "UPDATE timebell_schedules SET next_fire_at = NULL WHERE id = ? AND next_fire_at > ?"
                    late = int((now - datetime(1970, 1, 1, tzinfo=now.tzinfo)).total_seconds() * 1e6)
                    one.damaged = connection.exec_driver_sql(sql, (one.id, late)).rowcount > 0
            elif how != "next":
                hold = "overlap" if how == "turn" else "nonsense"
                where = "schedule_id IS NULL" if how == "turn" else "hold IS NULL"
                connection.exec_driver_sql(
                    f"UPDATE timebell_jobs SET hold = ? WHERE state = 'pending' AND {where}", (hold,)
                )

    # Invariants

    @invariant()
    def all_holds(self) -> None:
        """Check the invariants after every step."""
        if self.world.has_started:
            invariants.check(self)

    def teardown(self) -> None:
        """End all faults, let time pass, and check the final state."""
        try:
            if self.world.has_started:
                self.end_faults()
                invariants.check(self)
                invariants.final_state(self)
                self.audit()
        finally:
            self.world.__exit__()

    def audit(self) -> None:
        """Check that the product's own audit finds no difference."""
        audit = self.world.run(self.app.audit(START, self.world.now))
        assert not audit.differences, f"audit: {audit.differences[:3]}"

    def end_faults(self) -> None:
        """End all faults and ensure that nodes run."""
        world = self.world
        world.clear_faults()
        world.delay_requests(None)
        world.keep_heartbeats = self.rows_damaged
        for queue in list(self.paused_queues):
            self.let_go(queue)
        if self.nodes > 1 and not world.nodes and not world.restarting_nodes:
            world.run(world.add_node("node-1"))
        world.run(world.advance(seconds=150))


def run_histories(
    count: int, machine: type[Machine] = Machine, *, random: bool = False,
    phases: tuple[Phase, ...] = (Phase.generate, Phase.shrink),
) -> None:  # fmt: skip
    """Run histories, the same ones each time unless `random`; the exception of a history that fails is raised."""
    chosen = settings(
        max_examples=count, stateful_step_count=STEPS, phases=phases, deadline=None,
        database=None, derandomize=not random, suppress_health_check=list(HealthCheck),
        print_blob=True, report_multiple_bugs=False,
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=chosen)
