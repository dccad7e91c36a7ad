"""The decisions, as pure total functions: what fires, what is skipped and why, what follows an attempt.

The planner, the simulator and the tests call these same functions; none of them knows a clock or a store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import islice
from zlib import crc32

from timebell.errors import InvalidRecurrence
from timebell.model.job import Ending, Hold, JobState, Reason
from timebell.model.policy import CatchUp, Lateness, Overlap, Retry
from timebell.model.schedule import Schedule
from timebell.recurrence import Recurrence

SUPERSEDED = "superseded"  # why a job was cancelled that made way for a later occurrence
QUEUED = 100  # so many occurrences may wait for their turn under overlap `queue`
ROWS = 100  # up to so many skips of one decision get a row each; more become one range row
OUTAGE_PAUSE = 30.0  # seconds
TINY = timedelta(microseconds=1)


# These three are not frozen, as that makes them three times as dear to make; nothing changes them.


@dataclass(slots=True)
class Fire:
    """An occurrence that becomes a job; with a hold it waits for its turn. It starts at `run_at`, if not at once."""

    at: datetime
    hold: Hold | None = None
    run_at: datetime | None = None


@dataclass(slots=True)
class Skip:
    """Occurrences that do not fire: `count` of them from `at` to `to`, for one reason."""

    at: datetime
    to: datetime
    count: int
    reason: Reason


@dataclass(slots=True)
class Plan:
    """What becomes of every occurrence from a schedule's cursor up to now, and the next cursor.

    With `supersedes`, jobs of the schedule that were live before are to make way for the one that fires.
    """

    fires: list[Fire] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    next_fire_at: datetime | None = None
    supersedes: bool = False
    fault: str | None = None
    """Why nothing further is known of the schedule, which is to be set aside."""


def plan(schedule: Schedule, now: datetime, live: int, beside: int = 0) -> Plan:
    """Decide every occurrence in [schedule.next_fire_at, now]; `live` jobs of it are not finished, of which
    `beside` were made to run beside others.

    Up to `missed_after` late each one fires; those later are missed, and catch-up decides. Nothing is
    dropped: each occurrence is in exactly one Fire or Skip. The next cursor follows the nominal instants,
    never `now`. A fixed delay misses nothing: it fires once, however late, and the end of a job that takes turns
    sets its cursor.
    """
    cursor, recurrence, policies = schedule.next_fire_at, schedule.recurrence, schedule.policies
    if cursor is None or cursor > now:
        return Plan(next_fire_at=cursor)
    if recurrence.spec.delay is not None:
        if not live:
            return Plan([_start(schedule, Fire(cursor), 0, 0, now)])
        later = recurrence.following(None, now) if live == beside else None
        return Plan([], [Skip(cursor, cursor, 1, Reason.OVERLAP)], later)
    until = now + TINY
    recent_from = max(cursor, now - timedelta(seconds=policies.missed_after))
    recent, following, fault = _due(recurrence, recent_from, until)
    if not recurrence.overrides and not policies.jitter and cursor == recent_from and len(recent) == 1:
        # Nothing is missed, moved or put off: what follows comes to the same, at more cost.
        if not live:
            return Plan([Fire(recent[0])], [], following, False, fault)
        planned, left = _in_turn(policies.overlap, recent, 0, live)
        supersedes = policies.overlap is Overlap.CANCEL_PREVIOUS and bool(planned and live)
        return Plan(planned, [Skip(at, at, 1, Reason.OVERLAP) for at in left], following, supersedes, fault)
    overridden = _overridden(schedule, cursor, until)
    if overridden:
        recent = [at for at in recent if at not in {skip.at for skip in overridden}]
    planned, left = _in_turn(policies.overlap, recent, 0, live)
    fires, skips = _catch_up(schedule, cursor, recent_from, now, bool(planned))
    waiting: list[Fire] = []
    if len(fires) > policies.hold_above:
        waiting, fires = [Fire(at, Hold.RECOVER) for at in fires], []
    if fires and policies.catch_up is CatchUp.LATEST:  # one, as none of the recent ones fires
        planned, _ = _in_turn(policies.overlap, fires, 1, live)
    elif fires:
        planned, left = _in_turn(policies.overlap, [*fires, *recent], len(fires), live)
    skips.extend(Skip(at, at, 1, Reason.OVERLAP) for at in left)
    supersedes = policies.overlap is Overlap.CANCEL_PREVIOUS and not fires and bool(planned and live)
    planned = [_start(schedule, fire, n, len(fires), now) for n, fire in enumerate(planned)]
    return Plan([*waiting, *planned], [*overridden, *skips], following, supersedes, fault)


def _due(recurrence: Recurrence, start: datetime, end: datetime) -> tuple[list[datetime], datetime | None, str | None]:
    """The instants in [start, end), the one after them, and the reason where a search for it is given up."""
    found: list[datetime] = []
    try:
        following = recurrence.next(start - TINY)
        while following is not None and following < end:
            found.append(following)
            following = recurrence.next(following)
    except InvalidRecurrence as barren:
        return found, None, str(barren)
    return found, following, None


def next_of(recurrence: Recurrence, now: datetime) -> tuple[datetime | None, str | None]:
    """A schedule's cursor after `now`; and the reason, where a search for it is given up."""
    try:
        return recurrence.next(now), None
    except InvalidRecurrence as barren:
        return None, str(barren)


def _overridden(schedule: Schedule, start: datetime, end: datetime) -> list[Skip]:
    """What overrides skip or move away in [start, end)."""
    return [Skip(at, at, 1, Reason.OVERRIDE) for at in schedule.recurrence.overridden(start, end)]


def _start(schedule: Schedule, fire: Fire, n: int, caught_up: int, now: datetime) -> Fire:
    """The n-th of those that fire, at the time it is to start: made up for at their pace, others with jitter.

    The jitter is a hash of schedule and instant, so it is the same on every node and after a crash. It is only
    ever forward and ends before the next occurrence.
    """
    policies = schedule.policies
    if n < caught_up:
        pause = timedelta(seconds=n * policies.catch_up_pace)
        return replace(fire, run_at=now + pause) if pause else fire
    if not policies.jitter:
        return fire
    following, _ = next_of(schedule.recurrence, fire.at)
    most = policies.jitter
    if following is not None:
        most = min(most, (following - fire.at).total_seconds())
    fraction = crc32(f"{schedule.id}.{fire.at.isoformat()}".encode()) / 2**32
    return replace(fire, run_at=fire.at + timedelta(seconds=most * fraction))


def upcoming(schedule: Schedule, start: datetime, end: datetime) -> Iterator[datetime]:
    """What a schedule will fire in [start, end), in order, as far as is known: nothing of one that is paused or set
    aside, and of a fixed delay the next run alone. What is due before its cursor is decided already."""
    cursor = schedule.next_fire_at
    if cursor is None or not schedule.enabled or schedule.fault is not None:
        return
    if schedule.recurrence.spec.delay is not None:
        yield from [cursor] if start <= cursor < end else []
        return
    yield from schedule.recurrence.fired().between(max(start, cursor), end)


def passed_over(schedule: Schedule, now: datetime) -> Plan:
    """Leave out every occurrence in [schedule.next_fire_at, now], as it fell into a pause."""
    cursor, until = schedule.next_fire_at, now + TINY
    if cursor is None or cursor > now:
        return Plan(next_fire_at=cursor)
    recurrence = schedule.recurrence
    if recurrence.spec.delay is not None:
        return Plan([], [Skip(cursor, cursor, 1, Reason.PAUSED)], recurrence.following(None, now))
    skips = _skips(recurrence.fired(), cursor, until, Reason.PAUSED)
    following, fault = next_of(recurrence, now)
    return Plan([], [*_overridden(schedule, cursor, until), *skips], following, fault=fault)


def by_hand(schedule: Schedule, now: datetime, live: int) -> Plan:
    """An occurrence that somebody asks for now; overlap decides on it as on any other."""
    fires, left = _in_turn(schedule.policies.overlap, [now], 0, live)
    supersedes = schedule.policies.overlap is Overlap.CANCEL_PREVIOUS and bool(live)
    return Plan(fires, [Skip(at, at, 1, Reason.OVERLAP) for at in left], schedule.next_fire_at, supersedes)


def in_turn(instants: Sequence[datetime], live: int) -> list[Fire]:
    """Occurrences that are made up for: one after another, behind what is live."""
    return [Fire(at, Hold.OVERLAP if live or n else None) for n, at in enumerate(instants)]


def _in_turn(overlap: Overlap, due: list[datetime], caught_up: int, live: int) -> tuple[list[Fire], list[datetime]]:
    """Which of the due ones fire, with or without waiting for their turn, and which an overlap leaves out.

    The first `caught_up` of them are made up for: these take their turn whatever the policy says.
    """
    left: list[datetime] = []
    match overlap:
        case Overlap.ALLOW:
            return [Fire(at) for at in due], []
        case Overlap.QUEUE:
            room = max(caught_up, 1 + QUEUED - live)
            due, left = due[:room], due[room:]
        case Overlap.CANCEL_PREVIOUS if not caught_up:
            due, left = due[-1:], due[:-1]
        case Overlap.SKIP if not caught_up:
            room = 0 if live else 1
            due, left = due[:room], due[room:]
    return in_turn(due, live), left


def _catch_up(
    schedule: Schedule, cursor: datetime, end: datetime, now: datetime, recent: bool
) -> tuple[list[datetime], list[Skip]]:
    """The missed occurrences in [cursor, end): which of them fire after all, and the skips of the rest."""
    if cursor >= end:
        return [], []
    recurrence, policies = schedule.recurrence.fired(), schedule.policies
    if policies.lateness is Lateness.ANCHORED:
        return [], list(_skips(recurrence, cursor, end, Reason.EXPIRED))
    edge = min(max(cursor, now - schedule.catch_up_from), end)
    match policies.catch_up:
        case CatchUp.SKIP:
            return [], list(_skips(recurrence, cursor, end, Reason.MISSED))
        case CatchUp.LATEST:
            keep = [] if recent else _newest(recurrence, edge, end, 1)
            within = Reason.COALESCED
        case CatchUp.ALL:
            keep = _newest(recurrence, edge, end, policies.catch_up_limit)
            within = Reason.MISSED
    kept_from = keep[0] if keep else end
    skips = list(_skips(recurrence, cursor, edge, Reason.MISSED))
    if not keep and not recent:
        within = Reason.MISSED
    skips += _skips(recurrence, edge, kept_from, within)
    return keep, skips


def _newest(recurrence: Recurrence, start: datetime, end: datetime, limit: int) -> list[datetime]:
    """The last `limit` instants in [start, end), oldest first."""
    found: list[datetime] = []
    with suppress(InvalidRecurrence):  # a search for earlier ones that was given up
        at = recurrence.previous(end)
        while at is not None and at >= start and len(found) < limit:
            found.append(at)
            at = recurrence.previous(at)
    return found[::-1]


def _skips(recurrence: Recurrence, start: datetime, end: datetime, reason: Reason) -> Iterator[Skip]:
    """[start, end) as skips: a row each, or one range when there are many."""
    few = list(islice(recurrence.between(start, end), ROWS + 1))
    if len(few) <= ROWS:
        yield from (Skip(at, at, 1, reason) for at in few)
        return
    last = recurrence.previous(end)
    assert last is not None
    yield Skip(few[0], last, recurrence.count(start, end), reason)


def after_failure(
    job_id: str,
    number: int,
    tries: int,
    retry: Retry,
    at: datetime,
    code: str,
    error: str,
    *,
    retryable: bool = True,
    retry_after: float | None = None,
    counts: bool = True,
) -> Ending:
    """What a failed attempt comes to: another try after the backoff, or `failed` for good.

    One that does not count uses up no try, and the pauses between such ones stay below `OUTAGE_PAUSE`.

    `tries` counts those used up before this one. The jitter is a hash of job and attempt, so a rerun of the
    same history waits the same time; `retry_after` (seconds) can only lengthen the pause.
    """
    fraction = crc32(f"{job_id}.{number}".encode()) / 2**32
    if retryable and not counts:
        pause = max(min(retry.pause(max(number - tries, 1), fraction), OUTAGE_PAUSE), min(retry_after or 0.0, 86_400.0))
        later = at + timedelta(seconds=pause)
        return Ending(job_id, number, JobState.PENDING, at, run_at=later, error=error, code=code, counts=False)
    if not retryable or tries + 1 >= retry.attempts:
        return Ending(job_id, number, JobState.FAILED, at, error=error, code=code)
    pause = max(retry.pause(tries + 1, fraction), min(retry_after or 0.0, 86_400.0))
    return Ending(job_id, number, JobState.PENDING, at, run_at=at + timedelta(seconds=pause), error=error, code=code)


def superseded(job_id: str, number: int, at: datetime) -> Ending:
    """Stopped, to make way for a later occurrence."""
    return Ending(job_id, number, JobState.CANCELLED, at, reason=SUPERSEDED)


def expired(job_id: str, number: int, at: datetime) -> Ending:
    """Past `expires_after`: skipped when no attempt was made before this one, failed otherwise."""
    if number == 1:
        return Ending(job_id, number, JobState.SKIPPED, at, reason=Reason.EXPIRED, counts=False)
    error = "Its time ran out before a further attempt could start."
    return Ending(job_id, number, JobState.FAILED, at, reason=Reason.EXPIRED, code="EXPIRED", error=error, counts=False)
