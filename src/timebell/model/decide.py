"""Scheduling decisions as pure total functions: which occurrences fire or are skipped, and what follows an attempt.

The planner, the simulator and the tests call the same functions, which access neither a clock nor a store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import islice
from zlib import crc32

from timebell.errors import InvalidRecurrence
from timebell.model.job import Completion, Hold, JobState, Reason
from timebell.model.policy import CatchUp, Overlap, Retry, WhenLate
from timebell.model.schedule import Schedule
from timebell.recurrence import Recurrence

STOPPED = "stopped"  # reason of a job that was cancelled with stop=True while it ran
SUPERSEDED = "superseded"  # reason of a job that was cancelled in favor of a later occurrence
MAX_QUEUED_OCCURRENCES = 100  # limit of waiting occurrences per schedule under overlap `queue`
MAX_SKIP_ROWS = 100  # up to this many skips of one decision get a row each; more become one range row
MAX_OUTAGE_PAUSE_SECONDS = 30.0  # limit of the pause between attempts that do not count as used
MICROSECOND = timedelta(microseconds=1)


# These three are immutable by convention: creating a frozen dataclass takes three times as long.


@dataclass(slots=True)
class Fire:
    """An occurrence that becomes a job, with a hold if it has to wait; `run_at` None: it starts at `at`."""

    at: datetime
    hold: Hold | None = None
    run_at: datetime | None = None


@dataclass(slots=True)
class Skip:
    """Occurrences that do not fire: `count` of them from `at` to `last`, for one reason."""

    at: datetime
    last: datetime
    count: int
    reason: Reason


@dataclass(slots=True)
class Plan:
    """The decision on every occurrence from a schedule's cursor up to now, and the next cursor.

    With `supersedes`, live jobs of the schedule must be stopped in favor of the one that fires.
    """

    fires: list[Fire] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    next_fire_at: datetime | None = None
    supersedes: bool = False
    error: str | None = None
    """The error by which the schedule becomes errored, if the search for its next occurrence gave up."""


def plan(schedule: Schedule, now: datetime, live: int, concurrent: int = 0) -> Plan:
    """Decide every occurrence in [schedule.next_fire_at, now].

    `live` is the number of the schedule's unfinished jobs, `concurrent` how many of these are not serial.

    Occurrences up to `missed_after` late fire; older ones are missed and subject to catch-up. Nothing is dropped: each
    occurrence is in exactly one Fire or Skip. The next cursor follows the nominal instants, never `now`. A fixed delay
    misses nothing: it fires once, however late, and the completion of a serial job sets its cursor.
    """
    cursor, recurrence, policies = schedule.next_fire_at, schedule.recurrence, schedule.policies
    if cursor is None or cursor > now:
        return Plan(next_fire_at=cursor)
    if recurrence.spec.delay is not None:
        return _plan_fixed_delay(schedule, cursor, now, live, concurrent)
    until = now + MICROSECOND
    recent_from = max(cursor, now - timedelta(seconds=policies.missed_after))
    recent, following, error = _due_instants(recurrence, recent_from, until)
    if not recurrence.overrides and not policies.jitter and cursor == recent_from and len(recent) == 1:
        # Fast path: nothing is missed, moved or delayed. The general path below gives the same result, more slowly.
        occurrence = _plan_instant(schedule, recent[0], live)
        occurrence.next_fire_at, occurrence.error = following, error
        return occurrence
    overridden = _override_skips(schedule, cursor, until)
    if overridden:
        recent = [at for at in recent if at not in {skip.at for skip in overridden}]
    planned, skipped = _apply_overlap(policies.overlap, recent, 0, live)
    fires, skips = _catch_up(schedule, cursor, recent_from, now, bool(planned))
    waiting: list[Fire] = []
    if len(fires) > policies.hold_above:
        waiting, fires = [Fire(at, Hold.BACKLOG) for at in fires], []
    if fires and policies.catch_up is CatchUp.LATEST:
        # Exactly one fires: `latest` catches up only if no recent occurrence fires.
        planned, _ = _apply_overlap(policies.overlap, fires, 1, live)
    elif fires:
        planned, skipped = _apply_overlap(policies.overlap, [*fires, *recent], len(fires), live)
    skips.extend(Skip(at, at, 1, Reason.OVERLAP) for at in skipped)
    supersedes = policies.overlap is Overlap.CANCEL_PREVIOUS and not fires and bool(planned and live)
    planned = [_with_start_time(schedule, fire, n, len(fires), now) for n, fire in enumerate(planned)]
    return Plan([*waiting, *planned], [*overridden, *skips], following, supersedes, error)


def _plan_fixed_delay(schedule: Schedule, cursor: datetime, now: datetime, live: int, concurrent: int) -> Plan:
    if not live:
        return Plan([_with_start_time(schedule, Fire(cursor), 0, 0, now)])
    later = schedule.recurrence.next_after_run(None, now) if live == concurrent else None
    return Plan([], [Skip(cursor, cursor, 1, Reason.OVERLAP)], later)


def _plan_instant(schedule: Schedule, at: datetime, live: int) -> Plan:
    """Apply the overlap policy to one occurrence; the cursor stays."""
    if not live:
        return Plan([Fire(at)], next_fire_at=schedule.next_fire_at)
    overlap = schedule.policies.overlap
    fires, skipped = _apply_overlap(overlap, [at], 0, live)
    skips = [Skip(at, at, 1, Reason.OVERLAP) for at in skipped]
    return Plan(fires, skips, schedule.next_fire_at, overlap is Overlap.CANCEL_PREVIOUS and bool(fires))


def _due_instants(
    recurrence: Recurrence, start: datetime, end: datetime
) -> tuple[list[datetime], datetime | None, str | None]:
    """Return the instants in [start, end), the next one after them, and the error if the search for it gave up."""
    instants: list[datetime] = []
    try:
        following = recurrence.next(start - MICROSECOND)
        while following is not None and following < end:
            instants.append(following)
            following = recurrence.next(following)
    except InvalidRecurrence as error:
        return instants, None, str(error)
    return instants, following, None


def next_cursor(recurrence: Recurrence, now: datetime) -> tuple[datetime | None, str | None]:
    """Return a schedule's cursor after `now`, and the error if the search for it gave up."""
    try:
        return recurrence.next(now), None
    except InvalidRecurrence as error:
        return None, str(error)


def _override_skips(schedule: Schedule, start: datetime, end: datetime) -> list[Skip]:
    """Return the skips of occurrences in [start, end) that overrides skip or move."""
    return [Skip(at, at, 1, Reason.OVERRIDE) for at in schedule.recurrence.overridden_instants(start, end)]


def _with_start_time(schedule: Schedule, fire: Fire, index: int, caught_up: int, now: datetime) -> Fire:
    """Set the start time of the `index`-th occurrence: the first `caught_up` by the catch-up pace, others by jitter.

    The jitter is a hash of schedule and instant, so it is the same on every node and after a crash. It only delays,
    and never past the next occurrence.
    """
    policies = schedule.policies
    if index < caught_up:
        pause = timedelta(seconds=index * policies.catch_up_pace)
        return replace(fire, run_at=now + pause) if pause else fire
    if not policies.jitter:
        return fire
    following, _ = next_cursor(schedule.recurrence, fire.at)
    max_jitter = policies.jitter
    if following is not None:
        max_jitter = min(max_jitter, (following - fire.at).total_seconds())
    fraction = crc32(f"{schedule.id}.{fire.at.isoformat()}".encode()) / 2**32
    return replace(fire, run_at=fire.at + timedelta(seconds=max_jitter * fraction))


def upcoming(schedule: Schedule, start: datetime, end: datetime) -> Iterator[datetime]:
    """Yield the occurrences that a schedule will fire in [start, end), in order.

    A paused or errored schedule yields none, a fixed delay only its next run. Instants before the cursor are excluded:
    they are decided already.
    """
    cursor = schedule.next_fire_at
    if cursor is None or not schedule.enabled or schedule.error is not None:
        return
    if schedule.recurrence.spec.delay is not None:
        yield from [cursor] if start <= cursor < end else []
        return
    yield from schedule.recurrence.effective().between(max(start, cursor), end)


def skip_paused(schedule: Schedule, now: datetime) -> Plan:
    """Skip every occurrence in [schedule.next_fire_at, now], because the schedule was paused."""
    cursor, until = schedule.next_fire_at, now + MICROSECOND
    if cursor is None or cursor > now:
        return Plan(next_fire_at=cursor)
    recurrence = schedule.recurrence
    if recurrence.spec.delay is not None:
        return Plan([], [Skip(cursor, cursor, 1, Reason.PAUSED)], recurrence.next_after_run(None, now))
    skips = _make_skips(recurrence.effective(), cursor, until, Reason.PAUSED)
    following, error = next_cursor(recurrence, now)
    return Plan([], [*_override_skips(schedule, cursor, until), *skips], following, error=error)


def plan_manual(schedule: Schedule, now: datetime, live: int) -> Plan:
    """Plan an occurrence triggered manually at `now`, subject to the overlap policy."""
    return _plan_instant(schedule, now, live)


def queue_in_order(instants: Sequence[datetime], live: int) -> list[Fire]:
    """Return fires that run one after another: all are held, except the first one if there is no live job."""
    return [Fire(at, Hold.OVERLAP if live or n else None) for n, at in enumerate(instants)]


def _apply_overlap(
    overlap: Overlap, due: list[datetime], caught_up: int, live: int
) -> tuple[list[Fire], list[datetime]]:
    """Return which due occurrences fire, immediately or held, and which are skipped because of an overlap.

    The first `caught_up` are catch-up runs, which run one after another; if there are any, none is skipped under
    `skip` and `cancel_previous`.
    """
    skipped: list[datetime] = []
    match overlap:
        case Overlap.ALLOW:
            return [Fire(at) for at in due], []
        case Overlap.QUEUE:
            capacity = max(caught_up, 1 + MAX_QUEUED_OCCURRENCES - live)
            due, skipped = due[:capacity], due[capacity:]
        case Overlap.CANCEL_PREVIOUS if not caught_up:
            due, skipped = due[-1:], due[:-1]
        case Overlap.SKIP if not caught_up:
            capacity = 0 if live else 1
            due, skipped = due[:capacity], due[capacity:]
    return queue_in_order(due, live), skipped


def _catch_up(
    schedule: Schedule, cursor: datetime, end: datetime, now: datetime, has_recent: bool
) -> tuple[list[datetime], list[Skip]]:
    """Return which missed occurrences in [cursor, end) fire by catch-up, and the skips of the others."""
    if cursor >= end:
        return [], []
    recurrence, policies = schedule.recurrence.effective(), schedule.policies
    if policies.when_late is WhenLate.EXPIRE:
        return [], list(_make_skips(recurrence, cursor, end, Reason.EXPIRED))
    window_start = min(max(cursor, now - schedule.catch_up_span), end)
    match policies.catch_up:
        case CatchUp.SKIP:
            return [], list(_make_skips(recurrence, cursor, end, Reason.MISSED))
        case CatchUp.LATEST:
            fires = [] if has_recent else _newest(recurrence, window_start, end, 1)
            reason = Reason.COALESCED
        case CatchUp.ALL:
            fires = _newest(recurrence, window_start, end, policies.catch_up_limit)
            reason = Reason.MISSED
    fires_from = fires[0] if fires else end
    skips = list(_make_skips(recurrence, cursor, window_start, Reason.MISSED))
    if not fires and not has_recent:
        reason = Reason.MISSED
    skips += _make_skips(recurrence, window_start, fires_from, reason)
    return fires, skips


def _newest(recurrence: Recurrence, start: datetime, end: datetime, limit: int) -> list[datetime]:
    """Return the last `limit` instants in [start, end), oldest first."""
    instants: list[datetime] = []
    with suppress(InvalidRecurrence):  # the search for an earlier instant gave up
        at = recurrence.previous(end)
        while at is not None and at >= start and len(instants) < limit:
            instants.append(at)
            at = recurrence.previous(at)
    return instants[::-1]


def _make_skips(recurrence: Recurrence, start: datetime, end: datetime, reason: Reason) -> Iterator[Skip]:
    """Yield the skips for [start, end): one per occurrence, or one range if there are more than MAX_SKIP_ROWS."""
    instants = list(islice(recurrence.between(start, end), MAX_SKIP_ROWS + 1))
    if len(instants) <= MAX_SKIP_ROWS:
        yield from (Skip(at, at, 1, reason) for at in instants)
        return
    last = recurrence.previous(end)
    assert last is not None
    yield Skip(instants[0], last, recurrence.count(start, end), reason)


def complete_after_failure(
    job_id: str,
    attempt: int,
    attempts_used: int,
    retry: Retry,
    at: datetime,
    code: str,
    error: str,
    *,
    retryable: bool = True,
    retry_after: float | None = None,
    uses_attempt: bool = True,
) -> Completion:
    """Return the completion of a failed attempt: a retry after the backoff, or `failed`.

    `attempts_used` excludes this attempt. With `uses_attempt` false the attempt does not count, and the backoff is at
    most MAX_OUTAGE_PAUSE_SECONDS. The jitter is a hash of job and attempt, so that replaying the same history gives
    the same pauses. `retry_after` (seconds, at most a day) can only lengthen the pause.
    """
    fraction = crc32(f"{job_id}.{attempt}".encode()) / 2**32
    if retryable and not uses_attempt:
        pause = max(
            min(retry.pause_seconds(max(attempt - attempts_used, 1), fraction), MAX_OUTAGE_PAUSE_SECONDS),
            min(retry_after or 0.0, 86_400.0),
        )
        later = at + timedelta(seconds=pause)
        return Completion(
            job_id, attempt, JobState.PENDING, at, run_at=later, error=error, code=code, uses_attempt=False
        )
    if not retryable or attempts_used + 1 >= retry.attempts:
        return Completion(job_id, attempt, JobState.FAILED, at, error=error, code=code, attempts_allowed=retry.attempts)
    pause = max(retry.pause_seconds(attempts_used + 1, fraction), min(retry_after or 0.0, 86_400.0))
    return Completion(
        job_id, attempt, JobState.PENDING, at, run_at=at + timedelta(seconds=pause), error=error, code=code,
        attempts_allowed=retry.attempts,
    )  # fmt: skip


def complete_stopped(job_id: str, attempt: int, at: datetime, cause: Hold) -> Completion:
    """Return the completion of a job that was stopped in favor of a later occurrence, or because it was cancelled."""
    return Completion(job_id, attempt, JobState.CANCELLED, at, reason=SUPERSEDED if cause is Hold.STOPPING else STOPPED)


def complete_expired(job_id: str, attempt: int, at: datetime) -> Completion:
    """Return the completion of a job past `expires_after`: skipped on the first attempt, failed on a later one."""
    if attempt == 1:
        return Completion(job_id, attempt, JobState.SKIPPED, at, reason=Reason.EXPIRED, uses_attempt=False)
    error = "The job expired before another attempt could start."
    return Completion(
        job_id, attempt, JobState.FAILED, at, reason=Reason.EXPIRED, code="EXPIRED", error=error, uses_attempt=False
    )
