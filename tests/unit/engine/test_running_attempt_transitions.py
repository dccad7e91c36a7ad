"""The state of a running attempt after each event."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from timebell.engine.running_attempt import TRANSITIONS, AttemptEvent, AttemptState, RunningAttempt

# The state that follows; "." is an event without effect. The columns are the events in their order.
TABLE = """
             start    commit      roll-back  stop      drain      lose-lease  cancel     complete
claimed      running  .           .          stopping  draining   lost        .          .
running      .        committing  .          stopping  draining   lost        cancelled  completed
committing   .        .           running    stopping  draining   .           cancelled  completed
stopping     .        .           .          .         stopping   lost        .          completed
draining     .        .           .          .         .          lost        .          completed
lost         .        .           .          .         lost       lost        .          completed
cancelled    .        .           .          .         .          .           .          completed
completed    .        .           .          .         completed  .           .          .
"""
INTERRUPTS = (AttemptEvent.STOP, AttemptEvent.DRAIN, AttemptEvent.LOSE_LEASE)


def _expected() -> dict[tuple[AttemptState, AttemptEvent], AttemptState | None]:
    header, *rows = TABLE.strip().splitlines()
    events = [AttemptEvent(name.replace("-", " ")) for name in header.split()]
    return {
        (AttemptState(row.split()[0]), event): None if cell == "." else AttemptState(cell)
        for row in rows
        for event, cell in zip(events, row.split()[1:], strict=True)
    }


EXPECTED = _expected()


def _attempt(state: AttemptState) -> RunningAttempt:
    unused: Any = None
    return RunningAttempt(unused, 0.0, unused, unused, state)


def test_the_table_lists_every_pair_of_state_and_event() -> None:
    assert EXPECTED.keys() == set(itertools.product(AttemptState, AttemptEvent))
    assert TRANSITIONS.keys() == set(AttemptState)


@pytest.mark.parametrize(("state", "event"), list(EXPECTED))
def test_an_event_leads_to_the_state_in_the_table(state: AttemptState, event: AttemptEvent) -> None:
    running, following = _attempt(state), EXPECTED[state, event]
    assert running.transition(event) is (following is not None)
    assert running.state is (following or state)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(AttemptState, INTERRUPTS)))
def test_an_interrupt_cancels_the_task_exactly_if_it_has_an_effect(state: AttemptState, event: AttemptEvent) -> None:
    async def body() -> None:
        task = asyncio.ensure_future(asyncio.sleep(0))
        running = _attempt(state)
        running.task = task
        has_effect = EXPECTED[state, event] is not None
        assert running.interrupt(event) is has_effect
        assert bool(task.cancelling()) is has_effect
        await asyncio.wait([task])

    asyncio.run(body())


@pytest.mark.parametrize("event", INTERRUPTS)
def test_an_attempt_interrupted_before_its_start_keeps_its_task(event: AttemptEvent) -> None:
    async def body() -> None:
        running = _attempt(AttemptState.CLAIMED)
        assert running.interrupt(event)
        stopped, task = running.state, asyncio.current_task()
        assert task is not None
        running.start(task)
        assert (running.state, task.cancelling()) == (stopped, 0)
        assert stopped is EXPECTED[AttemptState.CLAIMED, event]

    asyncio.run(body())


@pytest.mark.parametrize(
    ("state", "needs_lease"),
    [(state, state not in (AttemptState.COMMITTING, AttemptState.LOST)) for state in AttemptState],
)
def test_a_lease_is_renewed_unless_it_is_lost_or_irrelevant(state: AttemptState, needs_lease: bool) -> None:
    assert _attempt(state).needs_lease is needs_lease
