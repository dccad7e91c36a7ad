"""The model with more in each history, which takes longer: for the slow run, and for histories aimed at a bug."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.model import invariants
from tests.model.machine import AIMS, Machine
from tests.model.people import thens
from tests.model.plans import QUEUE, plans

STILL = [*(aim for aim in AIMS if aim.endswith(".done")), *["claim.done", "claim_limited.done"] * 4]
"""Where a node stands still: most of all between a claim and what it claimed."""


class Harder(Machine):
    """Bursts, a clock that jumps, faults at points that get their time to strike."""

    @rule(
        plan=plans, many=st.sampled_from([3, 5]), group=st.sampled_from([None, "a", "b"]), late=st.booleans(),
        then=st.sampled_from([0, 10, 10, 70]),
    )  # fmt: skip
    def burst(self, plan: dict[str, Any], many: int, group: str | None, late: bool, then: int) -> None:
        """Several jobs at once for the queue with limits; perhaps it is paused until they are out of date."""
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

    def aim(self, strike: Callable[[], None], then: int) -> None:
        """Something is to befall the first node that gets to a point; what never struck before is forgotten, as a node
        waits for one at a time."""
        self.world._faults.clear()
        strike()
        self.then(then)

    @rule(at=st.sampled_from(AIMS), down=st.sampled_from([1, 30, 100]), then=thens)
    def crash_at(self, at: str, down: int, then: int) -> None:
        """The first node that gets to a point is killed there."""
        self.aim(lambda: self.world.crash(at=at, down=down), then)

    @rule(at=st.sampled_from(AIMS), then=thens)
    def break_at(self, at: str, then: int) -> None:
        """The first node that gets to a point hears nothing from the database."""
        self.aim(lambda: self.world.disconnect(at=at), then)

    @rule(at=st.sampled_from(STILL), dt=st.sampled_from([17, 60]), then=st.sampled_from([0, 20, 70]))
    def freeze_at(self, at: str, dt: int, then: int) -> None:
        """The first node that gets to a point stands still right there."""
        self.aim(lambda: self.world.freeze(None, dt, at=at), then)

    @rule(dt=st.sampled_from([20, 90]), plan=plans, then=st.sampled_from([0, 10, 20]))
    def deafen(self, dt: int, plan: dict[str, Any], then: int) -> None:
        """Nodes hear nothing of what others write, and somebody wants something at once."""
        self.world.deafen(dt)
        self.create(plan, 0, False, {}, 1)
        invariants.check(self)
        self.then(then)

    @rule(dt=st.sampled_from([20, 30]), then=thens)
    def step_clock(self, dt: int, then: int) -> None:
        """The database's clock jumps ahead, and with it everybody's, between two heartbeats of each node."""
        world = self.world
        if self.ledger.anything(world.now, world.now):  # it would seem to have lasted for longer
            return
        world.restless = True
        self.then(6)
        if not self.ledger.anything(world.now, world.now):
            world.clock.step(dt)
            self.stepped, self.waiting = world.now, {}
        self.then(6)
        world.restless = False
        self.then(then)
