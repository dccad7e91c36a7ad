"""The judge of the trigger chaos run finds each violation."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tests.faults.trigger_history import CheckIn, Fired, Place, RowHistory, RowState, judge

START = datetime(2027, 3, 1, 9, tzinfo=UTC)
OFFSETS = [timedelta(0)]


def state(seconds: float, start: datetime | None = START, *, active: bool = True) -> RowState:
    sent = START + timedelta(seconds=seconds)
    return RowState(sent, sent + timedelta(seconds=0.1), start, ("ana",), active)


def checked_in(seconds: float) -> CheckIn:
    sent = START + timedelta(seconds=seconds)
    return CheckIn(sent, sent + timedelta(seconds=0.1), "ana")


def run(seconds: float = 0.2, job: str = "a", attempt: int = 1, pid: int = 1, due: datetime = START) -> Fired:
    return Fired(Place("1", "ana", due), START + timedelta(seconds=seconds), job, attempt, pid)


FAR = START + timedelta(days=9)
CASES: dict[str, tuple[list[RowState], list[CheckIn], list[Fired], set[str]]] = {
    "fires": ([state(-9)], [], [run()], set()),
    "is lost": ([state(-9)], [], [], {"lost"}),
    "fires early": ([state(-9)], [], [run(-0.1)], {"early"}),
    "fires twice": ([state(-9)], [], [run(), run(job="b")], {"doubled"}),
    "fires twice in one attempt": ([state(-9)], [], [run(), run()], {"doubled"}),
    "is repeated without a kill": ([state(-9)], [], [run(), run(9, attempt=2)], {"doubled"}),
    "is repeated after a kill": ([state(-9)], [], [run(pid=7), run(9, attempt=2)], set()),
    "fires after a check-in": ([state(-9)], [checked_in(-1)], [run()], {"wrong"}),
    "is silent after a check-in": ([state(-9)], [checked_in(-1)], [], set()),
    "is ambiguous during a check-in": ([state(-9)], [checked_in(-0.05)], [run()], set()),
    "fires although moved": ([state(-9), state(-1, FAR)], [], [run()], {"wrong"}),
    "fires although deleted": ([state(-9), state(-1, None)], [], [run()], {"wrong"}),
    "fires although inactive": ([state(-9), state(-1, active=False)], [], [run()], {"wrong"}),
    "is lost after moving away and back": ([state(-9), state(-3, FAR), state(-2)], [], [], {"lost"}),
    "moves away after firing, and back": ([state(-9), state(1, FAR), state(2)], [], [run()], set()),
    "fires again when it is back": ([state(-9), state(1, FAR), state(2)], [], [run(), run(3, "b")], {"doubled"}),
    "fires at a time of no row": ([state(-9)], [], [run(), run(1, due=START + timedelta(seconds=1))], {"wrong"}),
}


@pytest.mark.parametrize("name", CASES)
def test_violations_are_found(name: str) -> None:
    states, check_ins, fired, expected = CASES[name]
    judged = judge({"1": RowHistory(states, check_ins)}, OFFSETS, fired, end=FAR, killed=[7])
    assert judged.violations().keys() == expected
