"""Short histories, each aimed at one planted bug that random ones meet late: it is noticed, and sound code passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.model import invariants
from tests.model.harder import Harder
from tests.model.mutants import MUTANTS
from tests.model.plans import Drawn, Grid

NO_LIMITS = {"concurrency": None, "concurrency_per_group": None, "rate": None, "per": 10}
POLICIES = {"catch_up": "latest", "catch_up_limit": 100, "catch_up_window": 86_400}


def does(do: str, takes: int = 0) -> dict[str, Any]:
    return {"do": do, "takes": takes}


def each(seconds: int, plan: dict[str, Any] = does("ok"), **policies: Any) -> Drawn:  # noqa: B008
    """A schedule that fires every so many seconds."""
    return plan, POLICIES | policies, Grid("interval", seconds), {}


def begin(model: Harder, schedule: Drawn = each(3600), **limits: int) -> None:  # noqa: B008
    """Two nodes, and nothing else to do."""
    model.begin(2, NO_LIMITS | limits, schedule, each(3600), does("ok"))
    model.advance(10)


def rate(model: Harder) -> None:
    begin(model, rate=2)
    model.burst(does("ok"), 5, None, False, 0)


def expired(model: Harder) -> None:
    begin(model, rate=2)
    model.burst(does("ok"), 5, None, True, 0)


def group(model: Harder) -> None:
    begin(model, concurrency_per_group=1)
    model.burst(does("ok", 4), 3, "a", False, 10)


def let_go(model: Harder) -> None:
    begin(model, concurrency_per_group=1)
    model.burst(does("ok", 1), 3, "a", False, 10)


def lease(model: Harder) -> None:
    """A node stands still between its claim and the handler, until another has taken over."""
    begin(model)
    model.freeze_at("claim.done", 60, 0)
    model.create(does("ok"), 2, False, {}, 70)


def own_lease(model: Harder) -> None:
    """A node is cut off for longer than its lease while it works."""
    begin(model)
    model.create(does("hang", 400), 0, False, {}, 1)
    model.cut(0, True, 60, 70)


def deaf(model: Harder) -> None:
    begin(model)
    model.deafen(90, does("ok"), 20)


def waiting_retry(model: Harder) -> None:
    begin(model, each(5, does("snooze"), overlap="skip"))
    model.advance(70)


def window(model: Harder) -> None:
    begin(model, each(5, catch_up="all", catch_up_window=70))
    model.crash_all(90)
    model.advance(10)


def limit(model: Harder) -> None:
    begin(model, each(5, catch_up="all", catch_up_limit=3))
    model.crash_all(90)
    model.advance(10)


def many_missed(model: Harder) -> None:
    begin(model, each(5))
    model.crash_all(700)
    model.advance(10)


def turns(model: Harder) -> None:
    """What runs beside others is to be followed by one that waits for its turn."""
    begin(model, each(20, does("ok", 22), overlap="allow"))
    model.advance(20)
    model.update(0, each(20, does("ok", 22), overlap="queue"))
    for _ in range(4):
        model.wait(5)


def healing(model: Harder) -> None:
    begin(model)
    model.create(does("ok"), 200, False, {}, 0)
    model.wound(0, "word")


def retry(model: Harder) -> None:
    begin(model, each(20, does("flaky")))
    model.advance(70)


def pause(model: Harder) -> None:
    begin(model, each(5))
    model.pause(0, 30, False)


AIMED: dict[str, tuple[Callable[[Harder], None], str]] = {
    "a lease of one's own is judged by the wall clock": (own_lease, "lease"),
    "no look at the lease before delivering": (lease, "fence"),
    "a retry moves the nominal instant": (retry, "key"),
    "a pause leaves no rows": (pause, "accounting"),
    "catch-up forgets its window": (window, "catch-up"),
    "catch-up forgets its limit": (limit, "catch-up"),
    "overlap ignores waiting retries": (waiting_retry, "overlap"),
    "who was to run beside others hands no turn on": (turns, "late"),
    "a rate is forgotten": (rate, "rate"),
    "what has expired uses up the rate": (expired, "rate"),
    "a group has no limit": (group, "group"),
    "who ends lets nobody of its group go": (let_go, "late"),
    "who hears nothing does not look": (deaf, "late"),
    "a range counts too few": (many_missed, "accounting"),
    "what is lost heals at the start only": (healing, "stuck"),
}
"""Of each bug the history, and the rule that is broken."""


def play(history: Callable[[Harder], None]) -> None:
    """A history from its beginning to its healed end."""
    model = Harder()
    try:
        history(model)
        invariants.check(model)
    except BaseException:
        model.world.__exit__()
        raise
    model.teardown()


@pytest.mark.parametrize("bug", AIMED)
def test_a_history_that_is_aimed_at_a_bug_notices_it_and_nothing_else(bug: str) -> None:
    history, rule = AIMED[bug]
    play(history)
    mutant = next(one for one in MUTANTS if one.name == bug)
    with mutant.planted(), pytest.raises(AssertionError, match=f"^{rule}: "):
        play(history)
