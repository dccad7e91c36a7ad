"""Short histories, each for one seeded bug that random ones detect late: it is detected, and correct code passes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from tests.model import invariants
from tests.model.extended_machine import ExtendedMachine
from tests.model.inputs import Drawn, Grid
from tests.model.mutants import MUTANTS

NO_LIMITS = {"concurrency": None, "concurrency_per_group": None, "rate": None, "per": 10}
POLICIES = {"catch_up": "latest", "catch_up_limit": 100, "catch_up_window": 86_400}


def does(do: str, takes: int = 0) -> dict[str, Any]:
    return {"do": do, "takes": takes}


def each(seconds: int, plan: dict[str, Any] = does("ok"), **policies: Any) -> Drawn:  # noqa: B008 - a constant value
    """Return a schedule with this interval."""
    return plan, POLICIES | policies, Grid("interval", seconds), {}


def begin(model: ExtendedMachine, schedule: Drawn = each(3600), **limits: int) -> None:  # noqa: B008 - a constant value
    """Start two nodes without other work."""
    model.begin(2, NO_LIMITS | limits, schedule, each(3600), does("ok"), model.interleaving)
    model.advance(10)


def rate(model: ExtendedMachine) -> None:
    begin(model, rate=2)
    model.burst(does("ok"), 5, None, False, 0)


def expired(model: ExtendedMachine) -> None:
    begin(model, rate=2)
    model.burst(does("ok"), 5, None, True, 0)


def group(model: ExtendedMachine) -> None:
    begin(model, concurrency_per_group=1)
    model.burst(does("ok", 4), 3, "a", False, 10)


def group_release(model: ExtendedMachine) -> None:
    begin(model, concurrency_per_group=1)
    model.burst(does("ok", 1), 3, "a", False, 10)


def lease(model: ExtendedMachine) -> None:
    """Freeze a node between claim and handler until another node has reclaimed the job."""
    begin(model)
    model.freeze_at("claim_batch.done", 60, 0)
    model.create(does("ok"), 2, False, {}, 70)


def own_lease(model: ExtendedMachine) -> None:
    """Cut off a node for longer than its lease while it runs a handler."""
    begin(model)
    model.create(does("hang", 400), 0, False, {}, 1)
    model.cut(0, True, 60, 70)


def stepped_clock(model: ExtendedMachine) -> None:
    """Step the clock while a job runs; in some interleavings, no renewal is between two observations of its lease."""
    begin(model)
    model.create(does("ok", 39), 0, False, {}, 1)
    model.step_clock(30, 0)


def muted_notifications(model: ExtendedMachine) -> None:
    begin(model)
    model.deafen(90, does("ok"), 20)


def waiting_retry(model: ExtendedMachine) -> None:
    begin(model, each(5, does("snooze"), overlap="skip"))
    model.advance(70)


def window(model: ExtendedMachine) -> None:
    begin(model, each(5, catch_up="all", catch_up_window=70))
    model.crash_all(90)
    model.advance(10)


def limit(model: ExtendedMachine) -> None:
    begin(model, each(5, catch_up="all", catch_up_limit=3))
    model.crash_all(90)
    model.advance(10)


def many_missed(model: ExtendedMachine) -> None:
    begin(model, each(5))
    model.crash_all(700)
    model.advance(10)


def serial(model: ExtendedMachine) -> None:
    """A concurrent job is followed by a serial one."""
    begin(model, each(20, does("ok", 22), overlap="allow"))
    model.advance(20)
    model.update(0, each(20, does("ok", 22), overlap="queue"))
    for _ in range(4):
        model.wait(5)


def repair(model: ExtendedMachine) -> None:
    begin(model)
    model.create(does("ok"), 200, False, {}, 0)
    model.wound(0, "word")


def retry(model: ExtendedMachine) -> None:
    begin(model, each(20, does("flaky")))
    model.advance(70)


def pause(model: ExtendedMachine) -> None:
    begin(model, each(5))
    model.pause(0, 30, False)


AIMED: dict[str, tuple[Callable[[ExtendedMachine], None], str]] = {
    "a node judges its own lease by the wall clock": (own_lease, "lease"),
    "the lease is not checked before the delivery": (lease, "fence"),
    "a retry moves the nominal instant": (retry, "key"),
    "a pause leaves no rows": (pause, "accounting"),
    "catch-up ignores its window": (window, "catch-up"),
    "catch-up ignores its limit": (limit, "catch-up"),
    "overlap ignores waiting retries": (waiting_retry, "overlap"),
    "a concurrent job does not release the next serial job": (serial, "late"),
    "a rate is ignored": (rate, "rate"),
    "expired jobs use up the rate": (expired, "rate"),
    "a group has no limit": (group, "group"),
    "a completion does not release the next job of its group": (group_release, "late"),
    "a node without notifications does not poll": (muted_notifications, "late"),
    "a range counts too few": (many_missed, "accounting"),
    "repair runs only at the start": (repair, "stuck"),
}
"""The history for each bug, and the rule that it violates."""


def play(history: Callable[[ExtendedMachine], None], interleaving: int = 0) -> None:
    """Run a history including its teardown, with the given order of operations (0: no request takes time)."""
    model = ExtendedMachine()
    model.interleaving = interleaving
    try:
        history(model)
        invariants.check(model)
    except BaseException:
        model.world.__exit__()
        raise
    model.teardown()


@pytest.mark.parametrize("bug", AIMED)
def test_a_targeted_history_detects_its_bug_and_passes_without_it(bug: str) -> None:
    history, rule = AIMED[bug]
    play(history)
    mutant = next(one for one in MUTANTS if one.name == bug)
    with mutant.seeded(), pytest.raises(AssertionError, match=f"^{rule}: "):
        play(history)


def interleavings() -> Iterator[ParameterSet]:
    """Yield each history with orders of operations; a thousand of them run each time, fewer of longer histories."""
    short = (rate, expired, group, group_release, serial, stepped_clock)
    for history in dict.fromkeys([*(history for history, _ in AIMED.values()), stepped_clock]):
        last = int(os.environ.get("TIMEBELL_TEST_INTERLEAVINGS", 110 if history in short else 34))
        yield pytest.param(history, range(1, last + 1), id=history.__name__)
        if history not in short:
            yield pytest.param(history, range(35, 71), id=f"{history.__name__}-more", marks=pytest.mark.slow)


@pytest.mark.parametrize(("history", "orders"), [*interleavings()])
def test_targeted_histories_pass_in_every_order_of_operations(
    history: Callable[[ExtendedMachine], None], orders: range
) -> None:
    for interleaving in orders:
        play(history, interleaving)


def test_some_order_of_operations_detects_leases_judged_by_the_clock_of_the_database() -> None:
    mutant = next(one for one in MUTANTS if one.name == "leases are judged by the database's clock")
    with mutant.seeded(), pytest.raises(AssertionError, match=r"^again: "):
        for interleaving in range(1, 101):  # about one in seven detects it
            play(stepped_clock, interleaving)
