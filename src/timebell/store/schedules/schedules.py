"""Schedule repository: upsert by name, edit, and fire due schedules in one transaction."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, insert, select, update

from timebell.errors import Conflict, InvalidRecurrence, NotFound, RevisionStale
from timebell.model.decide import next_cursor, plan, skip_paused
from timebell.model.job import Attempt, Hold, NewJob
from timebell.model.payload import sanitize_text
from timebell.model.policy import Overlap
from timebell.model.schedule import Schedule
from timebell.recurrence import Override, Recurrence
from timebell.recurrence.instants import format_instant
from timebell.recurrence.overrides import partition_overrides
from timebell.store import recent_writes
from timebell.store.jobs import claim, serial, start_on_insert
from timebell.store.jobs.bind_targets import bind_definition
from timebell.store.schedules import tzdata_log
from timebell.store.schedules.rows import (
    cached_action_from_json,
    schedule_from_columns,
    schedule_from_row,
    schedule_to_row,
    try_schedule_from_row,
    tzdata_columns,
    updated_tzdata_columns,
)
from timebell.store.schema import jobs as job_table
from timebell.store.schema import requests, revisions, schedules
from timebell.store.transaction import SCHEDULES, Transaction
from timebell.tracing import strip_context

log = logging.getLogger("timebell.planner")

# Builds the job of one occurrence: (schedule, scheduled_at, hold, now) -> job. Passed in by the caller because the
# store does not know the defaults of topics and targets.
JobBuilder = Callable[[Schedule, datetime, Any, datetime], NewJob]


def upsert_schedule(
    tx: Transaction, schedule: Schedule, build: JobBuilder, now: datetime, *, replace: bool, revision: int | None = None
) -> Schedule:  # fmt: skip
    """Insert a schedule, or replace the one with the same name; an identical spec is not an edit.

    An edit first decides every occurrence of the old spec up to now, so none is lost, and starts the new spec after
    now, so the edit itself fires nothing.

    Raises Conflict (SCHEDULE_EXISTS) if it exists and `replace` is false; if `revision` is specified, NotFound if the
    schedule does not exist and RevisionStale if it is at another revision.
    """
    schedule = bind_definition(tx, schedule)
    by_name = (schedules.c.tenant_id == schedule.tenant_id) & (schedules.c.name == schedule.name)
    row = tx.execute(select(schedules).where(by_name).with_for_update()).first()
    if revision is not None:
        _check_revision(schedule.name, row, revision)
    if row is None:
        _reserve_request_id(tx, schedule)
        tx.execute(insert(schedules).values(**schedule_to_row(schedule)))
        insert_revision(tx, schedule, schedule.created_at)  # its first occurrence is after its creation
        notify_planners(tx, schedule)
        return schedule
    if not replace:
        raise Conflict(
            f"A schedule named {schedule.name!r} already exists.", code="SCHEDULE_EXISTS", existing=row.id,
            fix="Use another name, or replace it: replace=True in Python, PUT /schedules/by-name/{name} in HTTP.",
        )  # fmt: skip
    old = try_schedule_from_row(row)
    if old is None:
        return overwrite_schedule(tx, row.id, schedule, None, now)
    new_row = schedule_to_row(schedule)
    unchanged = dataclasses.replace(old.recurrence, overrides=()) == schedule.recurrence and all(
        strip_context(new_row[part]) == strip_context(getattr(row, part)) for part in ("action", "policies")
    )
    has_same_code = schedule.code_hash is not None and schedule.code_hash == old.code_hash
    if old.error is None and (unchanged or has_same_code):
        return old
    return edit(tx, old, schedule, build, now)


def _reserve_request_id(tx: Transaction, schedule: Schedule) -> None:
    """Reserve the client request id of a new schedule, if it has one, forever. Raises Conflict if it was used."""
    request_id = schedule.action.metadata.get("client_request_id")
    if request_id is None:
        return
    request = {"tenant_id": schedule.tenant_id, "request_id": request_id}
    tx.execute(tx.dialect.insert_ignoring_duplicates(requests), [{**request, "job_id": schedule.id}])
    holder = tx.execute(select(requests.c.job_id).filter_by(**request)).scalar_one()
    if str(holder) != schedule.id:
        raise Conflict(
            f"The client request id {request_id!r} was already used for {holder}.",
            code="SCHEDULE_CLIENT_REQUEST_ID_IN_USE", existing=str(holder),
            fix="If it is the same request, use that schedule. For a new request, send a new id.",
        )  # fmt: skip


def _check_revision(name: str, row: Row[Any] | None, revision: int) -> None:
    if row is None:
        raise NotFound(f"There is no schedule {name}.", code="SCHEDULE_NOT_FOUND")
    if row.revision != revision:
        raise RevisionStale(
            f"{name} is at revision {row.revision}, but the change is based on revision {revision!r:.20}. It was last"
            f" changed at {format_instant(row.updated_at)}.",
            existing=row.id, fix="Fetch it again and repeat the change.",
        )  # fmt: skip


def edit(
    tx: Transaction, old: Schedule, new: Schedule, build: JobBuilder, now: datetime,
    overrides: Sequence[Override] | None = None,
) -> Schedule:  # fmt: skip
    """Replace the spec of a locked schedule by `new`, which has no overrides yet.

    The overrides of the old spec (or `overrides`) are carried over where the new spec has such an occurrence; the
    returned schedule lists the others as `dropped_overrides`.
    """
    decide_due_occurrences(tx, old, build, now)
    since = decided_until(old, now)
    carried, dropped = partition_overrides(
        old.recurrence.overrides if overrides is None else overrides, new.recurrence, since
    )
    for override in dropped:
        log.warning("dropped override of schedule %s: the edited spec has no occurrence at %s", old.id, override.at)
    if carried:
        new = dataclasses.replace(new, recurrence=dataclasses.replace(new.recurrence, overrides=carried))
    written = overwrite_schedule(tx, old.id, dataclasses.replace(new, updated_at=now), old, now)
    return dataclasses.replace(written, dropped_overrides=dropped)


def decide_due_occurrences(tx: Transaction, schedule: Schedule, build: JobBuilder, now: datetime) -> None:
    """Decide all occurrences due by now under the current spec: fired if enabled, skipped if paused."""
    if schedule.enabled:
        _fire_locked(tx, [schedule], build, now)
    else:
        skip_paused_occurrences(tx, schedule, build, now)


def decided_until(schedule: Schedule, now: datetime) -> datetime:
    """Return the instant up to which every occurrence is decided, after `decide_due_occurrences` at `now`.

    Later than `now` if another node decided occurrences first, with a clock that was ahead or read later.
    """
    last = now if schedule.last_fired_at is None else max(now, schedule.last_fired_at)
    cursor = schedule.next_fire_at
    if cursor is not None and cursor > now and schedule.recurrence.spec.delay is None:
        with suppress(InvalidRecurrence):  # the search for an earlier occurrence reached its limit
            before = schedule.recurrence.previous(cursor)
            last = last if before is None else max(last, before)
    return last


def skip_paused_occurrences(tx: Transaction, schedule: Schedule, build: JobBuilder, now: datetime) -> None:
    """Record the occurrences that the pause skipped up to now, and move the cursor past them."""
    planned = skip_paused(schedule, now)
    tzdata_log.record_due_schedules(tx, [schedule], now)
    if planned.skips:
        claim.record_skipped(
            tx,
            [(build(schedule, skip.at, None, now), skip.reason, skip.count, skip.last) for skip in planned.skips],
            now,
            _pause_note(schedule),
        )
    values = {"next_fire_at": planned.next_fire_at, "updated_at": now, "error": planned.error}
    values |= updated_tzdata_columns(schedule, planned.next_fire_at)
    tx.execute(update(schedules).where(schedules.c.id == schedule.id).values(**values))


def _pause_note(schedule: Schedule) -> str | None:
    """Describe the pause for the skipped rows: the schedule itself drops `paused_at` and its reason on resume."""
    if schedule.paused_at is None:
        return None
    suffix = f": {schedule.pause_reason}" if schedule.pause_reason else ""
    return sanitize_text(f"Paused since {format_instant(schedule.paused_at)}{suffix}", 2000)


def overwrite_schedule(tx: Transaction, id_: str, schedule: Schedule, old: Schedule | None, now: datetime) -> Schedule:
    """Replace a stored spec. The new cursor is after every decided occurrence, even if `now` lags behind."""
    matches = schedules.c.id == id_
    row = tx.execute(select(schedules).where(matches)).one()
    written = schedule_to_row(schedule)
    for column in ("id", "enabled", "created_at", "created_by", "last_fired_at", "paused_at", "pause_reason"):
        del written[column]
    since = now if old is None else decided_until(old, now)
    since = since if row.last_fired_at is None else max(since, row.last_fired_at)
    following, error = _next_fire_after_edit(tx, row, schedule, old, since)
    written |= {
        "revision": row.revision + 1, "error": error, "code_hash": schedule.code_hash or row.code_hash,
        "next_fire_at": following,
    }  # fmt: skip
    written |= tzdata_columns(schedule.recurrence, written["next_fire_at"])
    tx.execute(update(schedules).where(matches).values(**written))
    edited = schedule_from_row(tx.execute(select(schedules).where(matches)).one())
    insert_revision(tx, edited, since)
    notify_planners(tx, edited)
    return edited


def notify_planners(tx: Transaction, schedule: Schedule) -> None:
    """Notify of a new or edited schedule, unless it does not fire."""
    if schedule.enabled and schedule.next_fire_at is not None:
        tx.notify(SCHEDULES)


def _next_fire_after_edit(
    tx: Transaction, row: Row[Any], schedule: Schedule, old: Schedule | None, since: datetime
) -> tuple[datetime | None, str | None]:
    """Return the first instant of a new spec, and an error if the search for it reached its limit.

    For a fixed delay: None while a run is live, because its completion sets the next instant; otherwise the delay
    since the last run, if there was one, continues with its new length.
    """
    recurrence, delay = schedule.recurrence, schedule.recurrence.spec.delay
    if delay is None:
        return next_cursor(recurrence, since)
    in_backlog = job_table.c.hold == Hold.BACKLOG.value
    serial_jobs = (job_table.c.schedule_id == row.id) & job_table.c.serial & (job_table.c.hold.is_(None) | ~in_backlog)
    if tx.execute(select(job_table.c.id).where(serial_jobs).limit(1)).first() is not None:
        return None, None
    old_delay = None if old is None or row.last_fired_at is None else old.recurrence.spec.delay
    default_anchor = row.created_at + timedelta(microseconds=delay.length_us)
    if old_delay is not None and row.next_fire_at is not None and recurrence.next(since) in (None, default_anchor):
        last_run_ended_at = row.next_fire_at - timedelta(microseconds=old_delay.length_us)
        following = recurrence.next_after_run(None, last_run_ended_at)
        if following is None or following > since:
            return following, None
    return recurrence.first_fire(since), None


def replace_recurrence(tx: Transaction, row: Row[Any], recurrence: Recurrence, now: datetime) -> None:
    """Store another recurrence of a locked schedule as a new revision, without moving its cursor."""
    edited = dataclasses.replace(
        schedule_from_row(row), recurrence=recurrence, revision=row.revision + 1, updated_at=now
    )
    written = schedule_to_row(edited)
    values = {part: written[part] for part in ("recurrence", "revision", "updated_at")}
    tx.execute(update(schedules).where(schedules.c.id == row.id).values(**values))
    insert_revision(tx, edited, now)


def insert_revision(tx: Transaction, schedule: Schedule, since: datetime) -> None:
    """Store the spec of the schedule as the revision in effect after `since`."""
    tx.record(recent_writes.SCHEDULES, {schedule.id: schedule.updated_at})
    row = schedule_to_row(schedule)
    values = {part: row[part] for part in ("tenant_id", "recurrence", "action", "policies", "revision")}
    tx.execute(insert(revisions).values(schedule_id=schedule.id, effective_at=since, **values))


@dataclass(slots=True)
class FireResult:
    """Counts of one planner pass, and when the next schedule is due."""

    schedules: int = 0
    jobs: int = 0
    skips: int = 0
    cancels_requested: int = 0
    next_fire_at: datetime | None = None
    skips_by_reason: dict[str, int] = field(default_factory=dict)
    """Number of skipped occurrences by reason."""
    started_attempts: list[Attempt] = field(default_factory=list)
    """Attempts started directly on the node that fired them."""
    has_more: bool = False
    """True if the batch was as large as allowed, so that more schedules may be due."""


SkippedOccurrence = tuple[NewJob, str, int, datetime]
NO_LIVE_JOBS = (0, 0)


def fire_due_schedules(
    tx: Transaction,
    build: JobBuilder,
    now: datetime,
    limit: int,
    reservation: start_on_insert.SlotReservation | None = None,
) -> FireResult:
    """Fire up to `limit` due schedules: decide, insert jobs and skips, advance the cursors, all in one transaction.

    Jobs that fit into `reservation` are inserted as running. Other planners skip the rows locked here, and a crash
    leaves the cursors where they were.
    """
    rows = tx.dialect.lock_due_schedules(tx, now, limit)
    fired = _fire_locked(tx, _load_or_mark_errored(tx, rows), build, now, reservation) if rows else FireResult()
    fired.has_more = len(rows) >= limit
    fired.next_fire_at = find_next_fire_at(tx)
    return fired


def _load_or_mark_errored(tx: Transaction, rows: Sequence[Mapping[str, Any]]) -> list[Schedule]:
    """Return rows as schedules; rows that cannot be decoded (newer release, removed time zone) are marked errored."""
    loaded: list[Schedule] = []
    for row in rows:
        try:
            loaded.append(schedule_from_columns(row, tx.dialect.from_db, cached_action_from_json(row["action"])))
        except Exception as error:  # one broken schedule must not stop the others
            id_ = str(row["id"])
            tx.execute(update(schedules).where(schedules.c.id == id_).values(error=_log_and_format_error(id_, error)))
    return loaded


def _log_and_format_error(schedule_id: str, error: Exception) -> str:
    log.error("schedule %s errored: it cannot be fired", schedule_id, exc_info=error)
    return f"{type(error).__name__}: {error}"[:500].replace("\x00", "")


def _fire_locked(
    tx: Transaction,
    due: Sequence[Schedule],
    build: JobBuilder,
    now: datetime,
    reservation: start_on_insert.SlotReservation | None = None,
) -> FireResult:
    """Fire schedules whose rows are locked."""
    tzdata_log.record_due_schedules(tx, due, now)
    live = count_live_jobs(tx, [one.id for one in due if one.policies.overlap is not Overlap.ALLOW])
    new: list[NewJob] = []
    skips: list[SkippedOccurrence] = []
    advances = []
    successors: dict[str, str] = {}
    for schedule in due:
        advance: dict[str, Any] = {"id": schedule.id, "error": None, "last_fired_at": None}
        try:
            planned = plan(schedule, now, *(live.get(schedule.id, NO_LIVE_JOBS) if live else NO_LIVE_JOBS))
            built: list[NewJob] = []
            for fire in planned.fires:
                job = build(schedule, fire.at, fire.hold, now)
                job.run_at = fire.run_at or job.run_at
                built.append(job)
            skipped: list[SkippedOccurrence] = [
                (build(schedule, skip.at, None, now), skip.reason.value, skip.count, skip.last)
                for skip in planned.skips
            ]
        except Exception as error:  # one broken schedule must not stop the others
            advance["error"] = _log_and_format_error(schedule.id, error)
            advance["next_fire_at"] = tx.dialect.to_db(schedule.next_fire_at)
            advance |= updated_tzdata_columns(schedule, schedule.next_fire_at)
        else:
            new += built
            skips += skipped
            advance["next_fire_at"] = tx.dialect.to_db(planned.next_fire_at)
            advance |= updated_tzdata_columns(schedule, planned.next_fire_at)
            if planned.error is not None:
                log.error("schedule %s errored: %s", schedule.id, planned.error)
                advance["error"] = planned.error[:500]
            if planned.supersedes:
                successors[schedule.id] = built[-1].id
            if planned.fires:
                advance["last_fired_at"] = tx.dialect.to_db(planned.fires[-1].at)
        advances.append(advance)
    started: list[Attempt] = []
    if new:
        started = start_on_insert.insert_and_start(tx, new, reservation, now)
        if live and (newly_serial := [id_ for id_, (_, non_serial) in live.items() if non_serial]):
            claim.mark_serial(tx, newly_serial)
    if skips:
        claim.record_skipped(tx, skips, now)
    stopping = serial.supersede(tx, successors, now) if successors else 0
    tx.dialect.advance_cursors(tx, advances)
    reasons: dict[str, int] = {}
    for _, reason, count, _ in skips:
        reasons[reason] = reasons.get(reason, 0) + count
    return FireResult(
        len(due), len(new), sum(reasons.values()), stopping, skips_by_reason=reasons, started_attempts=started
    )


def count_live_jobs(tx: Transaction, ids: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the number of live jobs and of live non-serial jobs by schedule id; schedules without any are omitted."""
    rows = tx.dialect.count_live_jobs(tx, ids) if ids else []
    return {str(row["schedule_id"]): (row["live"], row["non_serial"]) for row in rows} if rows else {}


def find_next_fire_at(tx: Transaction) -> datetime | None:
    """Return the next instant at which any schedule is due; a single index lookup."""
    return tx.dialect.find_next_fire_at(tx)
