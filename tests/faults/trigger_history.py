"""Judge of the firings of a trigger by the history of its rows, computed without any code of the product.

A row is written at some instant between `sent` and `acked`. Times that follow from a row, and what fired, are compared
row by row. Whatever a write decides that was under way at a due time is ambiguous: it may fire, or not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

SETTLE = timedelta(seconds=90)
"""A firing is certain to happen if nothing changes for this long after it is due, whatever fails meanwhile."""


@dataclass(frozen=True)
class RowState:
    """Content of a row since a write; without `start` the row was deleted."""

    sent: datetime
    acked: datetime
    start: datetime | None
    users: tuple[str, ...] = ()
    active: bool = True


class CheckIn(NamedTuple):
    """A check-in, after which nothing is sent to its user."""

    sent: datetime
    acked: datetime
    user: str


@dataclass
class RowHistory:
    """Everything that was written about a row, in this order."""

    states: list[RowState] = field(default_factory=list)
    check_ins: list[CheckIn] = field(default_factory=list)


class Place(NamedTuple):
    """One firing that a row asks for, or once asked for."""

    row: str
    user: str
    due: datetime


class Fired(NamedTuple):
    """One run of the handler, in the process `pid`."""

    place: Place
    at: datetime
    job: str
    attempt: int
    pid: int


@dataclass
class Judgement:
    """Places by verdict; all but `expected`, `silent` and `ambiguous` are violations."""

    expected: list[Place] = field(default_factory=list)
    silent: list[Place] = field(default_factory=list)
    ambiguous: list[Place] = field(default_factory=list)
    lost: list[Place] = field(default_factory=list)
    wrong: list[Place] = field(default_factory=list)
    doubled: list[Place] = field(default_factory=list)
    early: list[Place] = field(default_factory=list)

    def violations(self) -> dict[str, list[Place]]:
        """Return the violations by kind, without kinds that did not happen."""
        found = {"lost": self.lost, "wrong": self.wrong, "doubled": self.doubled, "early": self.early}
        return {kind: places for kind, places in found.items() if places}


def judge(
    rows: Mapping[str, RowHistory], offsets: Sequence[timedelta], fired: Sequence[Fired], *, end: datetime,
    killed: Sequence[int] = (),
) -> Judgement:  # fmt: skip
    """Compare what fired until `end` with what the rows ask for.

    `killed` are the processes that may have left a run unfinished.
    """
    result, runs = Judgement(), defaultdict[Place, list[Fired]](list)
    for run in fired:
        runs[run.place].append(run)
        if run.at < run.place.due:
            result.early.append(run.place)
    places = {place for row, history in rows.items() for place in _places(row, history, offsets)}
    result.wrong += runs.keys() - places
    for place in sorted(place for place in places if place.due < end):
        must, may = _verdict(rows[place.row], place, offsets)
        (result.expected if must else result.ambiguous if may else result.silent).append(place)
        if must and place not in runs:
            result.lost.append(place)
        if not may and place in runs:
            result.wrong.append(place)
        if _is_doubled(runs.get(place, []), killed):
            result.doubled.append(place)
    return result


def _places(row: str, history: RowHistory, offsets: Sequence[timedelta]) -> Iterator[Place]:
    for state in history.states:
        if state.start is not None and state.active:
            for offset in offsets:
                for user in state.users:
                    yield Place(row, user, state.start + offset)


def _verdict(history: RowHistory, place: Place, offsets: Sequence[timedelta]) -> tuple[bool, bool]:
    """Return whether a place must fire, and whether it may."""
    if any(one.user == place.user and one.acked < place.due for one in history.check_ins):
        return False, False
    must, may = True, False
    for number, state in enumerate(history.states):
        following = history.states[number + 1] if number + 1 < len(history.states) else None
        if following is not None and following.acked < place.due:
            continue  # was replaced in time
        asks = place in _places(place.row, RowHistory([state]), offsets)
        may |= asks
        if number == 0 and state.acked >= place.due:
            must = False  # was inserted too late to be certain
        if not asks and state.sent < place.due + SETTLE:
            must = False
    checked_in = any(one.user == place.user and one.sent < place.due + SETTLE for one in history.check_ins)
    return must and may and not checked_in, may


def _is_doubled(runs: Sequence[Fired], killed: Sequence[int]) -> bool:
    """Return whether runs are more than one, except those that a killed process had begun."""
    if len({run.job for run in runs}) > 1 or max(Counter(run.attempt for run in runs).values(), default=0) > 1:
        return True
    return sum(run.pid not in killed for run in runs) > 1
