"""The state machine with more events in each history: for the slow run and for targeted histories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.model import invariants
from tests.model.clients import thens
from tests.model.inputs import QUEUE, plans
from tests.model.machine import FAULT_POINT_NAMES, Machine

FREEZE_POINTS = [
    *(aim for aim in FAULT_POINT_NAMES if aim.endswith(".done")),
    *["claim_batch.done", "claim_limited.done"] * 4,
]
"""Fault points for freezes; mostly between a claim and the start of the claimed jobs."""


class ExtendedMachine(Machine):
    """Adds bursts, clock steps, and fault points with enough time to be reached."""

    @rule(
        plan=plans, many=st.sampled_from([3, 5]), group=st.sampled_from([None, "a", "b"]), late=st.booleans(),
        then=st.sampled_from([0, 10, 10, 70]),
    )  # fmt: skip
    def burst(self, plan: dict[str, Any], many: int, group: str | None, late: bool, then: int) -> None:
        """Create several jobs for the limited queue; with `late`, it is paused until they expire."""
        where: dict[str, Any] = {"queue": QUEUE} if group is None else {"queue": QUEUE, "group": group}
        if late:
            self.halt(QUEUE, 0, False)
        for _ in range(many):
            self.create(plan, 2, False, where | ({"expires_after": 60} if late else {}), 0)
        if late:
            self.then(70)
            self.let_go(QUEUE)
        self.then(3)
        invariants.check(self)
        self.then(then)

    def aim(self, inject: Callable[[], None], then: int) -> None:
        """Inject a fault at a point; discard unreached ones, because a node has one pending fault at a time."""
        self.world._faults.clear()
        inject()
        self.then(then)

    @rule(at=st.sampled_from(FAULT_POINT_NAMES), down=st.sampled_from([1, 30, 100]), then=thens)
    def crash_at(self, at: str, down: int, then: int) -> None:
        """Kill the first node that reaches a fault point."""
        self.aim(lambda: self.world.crash(at=at, down=down), then)

    @rule(at=st.sampled_from(FAULT_POINT_NAMES), then=thens)
    def break_at(self, at: str, then: int) -> None:
        """Break the connection of the first node that reaches a fault point."""
        self.aim(lambda: self.world.disconnect(at=at), then)

    @rule(at=st.sampled_from(FREEZE_POINTS), dt=st.sampled_from([17, 60]), then=st.sampled_from([0, 20, 70]))
    def freeze_at(self, at: str, dt: int, then: int) -> None:
        """Freeze the first node that reaches a fault point."""
        self.aim(lambda: self.world.freeze(None, dt, at=at), then)

    @rule(dt=st.sampled_from([20, 90]), plan=plans, then=st.sampled_from([0, 10, 20]))
    def deafen(self, dt: int, plan: dict[str, Any], then: int) -> None:
        """Mute notifications, and create a job that is due immediately."""
        self.world.mute_notifications(dt)
        self.create(plan, 0, False, {}, 1)
        invariants.check(self)
        self.then(then)

    @rule(dt=st.sampled_from([20, 30]), then=thens)
    def step_clock(self, dt: int, then: int) -> None:
        """Step the clock of the database, and thereby of all nodes, forward between two heartbeats."""
        world = self.world
        if self.ledger.any_fault(world.now, world.now):  # the step would extend the fault
            return
        world.keep_heartbeats = True
        self.then(6)
        if not self.ledger.any_fault(world.now, world.now):
            world.clock.step(dt)
            self.clock_stepped_at, self.waiting = world.now, {}
        self.then(6)
        world.keep_heartbeats = False
        self.then(then)
