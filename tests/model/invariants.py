"""Invariants after every step and in the final state. Each failure message starts with the name of the rule."""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

from tests.model.ledger import ONE_MICROSECOND, RETRIES, RETRY_DELAY, SNOOZE_SECONDS, Effect
from tests.model.queue_invariants import WRITE_DELAY, halted, limits, prompt, rate, waits_for_room
from tests.model.rows import Row, cursors, written

if TYPE_CHECKING:
    from tests.model.machine import Machine
    from tests.model.records import ScheduleRecord

MISSED_AFTER = timedelta(seconds=60)
MAX_LEASE = timedelta(seconds=15 + 5 + 2 + 1)  # a lease, a heartbeat, the longest retry pause and a margin
RECONNECT_DELAY = timedelta(seconds=3)  # the longest reconnect pause and a margin
FINAL = ("completed", "failed", "cancelled", "skipped")


def check(model: Machine) -> None:
    """Check all invariants that hold at any time."""
    rows = model.rows()
    by_id = {row.id: row for row in rows}
    assert len(by_id) == len(rows), "rows: a job is both live and finished, or has two rows"
    of: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.schedule_id is not None:
            of[row.schedule_id].append(row)
    never_early(model, by_id)
    keys(model, by_id)
    attempts(model, by_id)
    overlap(model, by_id)
    limits(model, by_id)
    rate(model, by_id)
    halted(model, by_id)
    current_attempts(model, by_id)
    completions(model, by_id)
    requests(model, rows)
    cancelled(model)
    skips(model, rows, of)
    once(rows)
    moments = cursors(model.world)
    prompt(model, rows, moments)
    for schedule in model.schedules:
        if schedule.grids[-1][1].kind != "delay":
            accounting(model, schedule, of[schedule.id], moments.get(schedule.id))
            catch_up(schedule, of[schedule.id])
        paused(schedule, of[schedule.id])
    assert all(fault is None for _, _, fault in moments.values()), "fault: a schedule became errored"


def never_early(model: Machine, by_id: dict[str, Row]) -> None:
    """No attempt starts before its instant or the time to which it was rescheduled."""
    for effect in model.ledger.effects:
        due = model.moved.get(effect.job_id, effect.scheduled_at)
        assert effect.began >= due, f"early: {effect}, due at {due}"
        job = model.one_time_jobs.get(effect.job_id)
        assert job is None or effect.began >= job.run_at, f"early: {effect}"


def keys(model: Machine, by_id: dict[str, Row]) -> None:
    """Occurrences and keys correspond one to one; the key of a one-time job is its id."""
    jobs: dict[str, str] = {}
    for effect in model.ledger.effects:
        row = by_id[effect.job_id]
        if effect.schedule_id is None:
            assert effect.key == effect.job_id, f"key: {effect}"
            continue
        at = effect.scheduled_at.strftime("%Y%m%dT%H%M%S") + (
            effect.scheduled_at.strftime(".%fZ").replace(".000000", "")
        )
        kind = "" if row.kind == "planned" else f".{row.kind}"
        assert effect.key == f"{effect.schedule_id}.{at}{kind}", f"key: {effect} of {row}"
        assert effect.scheduled_at == row.scheduled_at, f"key: {effect} of {row}"
        root = effect.job_id
        while (before := by_id[root].replaces) is not None and before in model.replaced:
            root = before
        assert jobs.setdefault(effect.key, root) == root, f"key: {effect.key} is of {root} and of {jobs[effect.key]}"


def attempts(model: Machine, by_id: dict[str, Row]) -> None:
    """A job is attempted again only after a failure or a fault, with a higher number and after its pause."""
    ledger = model.ledger
    for job_id, calls in ledger.by_job.items():
        for one, two in pairwise(calls):
            assert two.attempt > one.attempt, f"fence: attempt {two.attempt} started after {one.attempt}: {two}"
            if job_id in model.retried or ledger.excused(one, two.began):
                continue
            assert one.outcome in ("failed", "timeout", "snoozed"), f"again: {two} after {one}"
            assert one.ended is not None
            pause = SNOOZE_SECONDS if one.outcome == "snoozed" else RETRY_DELAY
            assert two.began >= one.ended + timedelta(seconds=pause), f"early: {two} after {one}"
        failed = [one for one in calls if one.outcome in ("failed", "timeout") and one.ended is not None]
        if len(failed) > RETRIES and job_id not in model.retried:
            last = failed[-1]
            assert ledger.any_fault(failed[0].began, last.began + WRITE_DELAY), (
                f"retry: failed {len(failed)} times: {last}"
            )


def overlap(model: Machine, by_id: dict[str, Row]) -> None:
    """Serial jobs of a schedule run one at a time except after faults, and none starts while another awaits a retry."""
    for effect in model.ledger.effects:
        for other in effect.concurrent:
            if other.schedule_id is None or other.schedule_id != effect.schedule_id or other.job_id == effect.job_id:
                continue
            if all(is_serial(model, by_id[one.job_id]) for one in (effect, other)):
                assert model.ledger.excused(other, effect.began), f"overlap: {effect} concurrent with {other}"
    of: dict[str, list[Effect]] = defaultdict(list)
    for effect in model.ledger.effects:
        if effect.schedule_id is not None:
            of[effect.schedule_id].append(effect)
    for calls in of.values():
        before: dict[str, int] = {}  # position of the previous attempt of each job
        for at, two in enumerate(calls):
            since = before.get(two.job_id, at)
            before[two.job_id], one = at, calls[since]
            if one.ended is None or two.job_id in model.retried:
                continue
            for effect in calls[since + 1 : at]:
                turns = effect.began >= one.ended and all(is_serial(model, by_id[it.job_id]) for it in (effect, one))
                assert not turns or model.ledger.excused(one, two.began), f"overlap: {effect} while {one} waited"


def is_serial(model: Machine, row: Row) -> bool:
    """Return whether a job of a schedule was always serial."""
    schedule = next(one for one in model.schedules if one.id == row.schedule_id)
    return row.serial and (schedule.concurrent_until is None or row.created_at > schedule.concurrent_until)


def current_attempts(model: Machine, by_id: dict[str, Row]) -> None:
    """A call on a healthy node is the current attempt of its job; on a cut-off node it ends with its lease."""
    now = model.world.now
    for effect in model.ledger.open:
        if not model.ledger.excused(effect, now):
            row = by_id[effect.job_id]
            at = (row.state, row.attempt)
            assert at == ("running", effect.attempt), f"fence: {effect} runs, and its job is {row}"
        effect.cut = model.ledger.cut_duration(effect.node)
    for effect in model.ledger.effects:
        assert effect.cut is None or effect.cut <= MAX_LEASE, f"lease: {effect} ran long after its node was cut off"


def completions(model: Machine, by_id: dict[str, Row]) -> None:
    """The recorded completion of a job is the outcome of its own last attempt."""
    ledger, now = model.ledger, model.world.now
    wrote = Counter(written(model.world))
    may = {one.id for one in model.schedules if one.deleted is not None or "cancel_previous" in one.overlaps}
    for job_id, row in by_id.items():
        calls = ledger.by_job.get(job_id, ())
        last = calls[-1] if calls else None
        if row.state == "completed":
            done = [one for one in calls if one.attempt == row.attempt and one.outcome == "done"]
            within = [one for one in calls if one.plan["do"] == "within" and wrote[job_id]]
            assert done or within, f"lost: completed without its attempt {row.attempt}: {row}, {calls}"
            assert row.result == str(row.attempt), f"fence: completed by attempt {row.result}: {row}"
        elif row.state == "failed":
            expired = row.reason == "expired" and (row.finished_at or now) - row.scheduled_at >= MISSED_AFTER
            assert expired or row.attempts_used >= RETRIES, f"retry: failed after {row.attempts_used} attempts: {row}"
        elif row.state == "skipped":
            assert not calls, f"skipped: it ran: {row}"
        elif row.state == "cancelled":
            why = (
                job_id in model.cancels or job_id in model.replaced or row.reason in _REASONS or row.schedule_id in may
            )
            assert why or (row.reason == "discarded" and model.discarded), f"cancelled: without request: {row}"
        settled = last is not None and last.ended is not None and last.ended < now - model.write_delay
        quiet = last is not None and not ledger.had_fault(last.node, last.began - RECONNECT_DELAY, now)
        if last is not None and settled and last.outcome == "done" and quiet:
            assert row.state == "completed" and row.attempt == last.attempt, f"lost: {last} is done: {row}"
        assert wrote[job_id] <= (row.state == "completed"), f"within: {wrote[job_id]} rows written: {row}"


_REASONS = ("as planned",)


def requests(model: Machine, rows: list[Row]) -> None:
    """A request creates one job, however often it is sent."""
    made = Counter(row.metadata for row in rows if row.metadata is not None and row.replaces is None)
    assert not any(count > 1 for count in made.values()), f"request: {made.most_common(1)}"
    there = {row.id for row in rows}
    assert there.issuperset(model.one_time_jobs), "lost: an acknowledged job is missing"


def cancelled(model: Machine) -> None:
    """No attempt starts after `prevented` or of replaced jobs, and no further one after `in_flight`."""
    for job_id, result in model.cancels.items():
        for effect in model.ledger.by_job.get(job_id, ())[result.calls :]:
            assert result.outcome != "prevented", f"prevented: and then {effect}"
            assert effect.attempt <= result.attempt, f"in_flight: and then {effect}"
    for job_id, (_, before) in model.replaced.items():
        for effect in model.ledger.by_job.get(job_id, ())[before:]:
            raise AssertionError(f"prevented: it was rescheduled, and then {effect}")
    gone = {one.id: one.deleted for one in model.schedules if one.deleted is not None}
    for effect in model.ledger.effects:
        deleted = gone.get(effect.schedule_id or "")
        if deleted is not None and effect.began > deleted and effect.job_id not in model.retried:
            assert model.ledger.had_fault(effect.node, deleted, effect.began), f"deleted: and then {effect}"


def skips(model: Machine, rows: list[Row], of: dict[str, list[Row]]) -> None:
    """Every skip has a correct reason."""
    for row in rows:
        if row.state != "skipped":
            continue
        assert row.finished_at is not None
        late = row.finished_at - row.scheduled_at
        if row.reason == "expired" and row.replaces is not None:
            continue  # rescheduled together with its remaining time
        if row.reason in ("missed", "coalesced", "expired"):
            assert late >= MISSED_AFTER, f"skipped: {row.reason}, only {late} late: {row}"
        elif row.reason == "overlap" and not model.ledger.any_fault(row.finished_at - WRITE_DELAY, row.finished_at):
            assert any(
                (one.state != "skipped" or one.reason == "expired")
                and one.id != row.id
                and one.created_at - model.claim_delay
                <= row.finished_at
                <= (one.finished_at or row.finished_at) + model.write_delay
                for one in of[row.schedule_id or ""]
            ), f"skipped: no job was live: {row}"
        elif row.reason != "overlap":
            assert row.reason in ("paused", "override"), f"skipped: {row}"


def once(rows: list[Row]) -> None:
    """An occurrence completes at most once."""
    done = Counter(
        (row.schedule_id, row.scheduled_at)
        for row in rows
        if row.state == "completed" and row.schedule_id is not None and row.kind != "manual"
    )
    assert all(count == 1 for count in done.values()), f"twice: {done.most_common(1)}"


def accounting(
    model: Machine, schedule: ScheduleRecord, rows: list[Row], cursor: tuple[datetime | None, bool, str | None] | None
) -> None:
    """Every occurrence up to the cursor, and nothing else, has one row or is in a range; the cursor is the next one."""
    planned = [row for row in rows if row.kind == "planned" and row.reason != "rescheduled"]
    decided = Counter(row.scheduled_at for row in planned if row.count == 1)
    ranges = [row for row in planned if row.count > 1]
    assert all(count == 1 for count in decided.values()), f"accounting: two rows of {decided.most_common(1)}"
    last = max([*decided, *(row.to or row.scheduled_at for row in ranges)], default=schedule.made)
    if schedule.deleted is not None:
        assert cursor is None, f"deleted: {schedule.name} exists"
        until = schedule.deleted
    else:
        assert cursor is not None, f"lost: {schedule.name} does not exist"
        at, _, _ = cursor
        if at is None:
            assert schedule.damaged, f"accounting: {schedule.name} has no next instant"
            until = last
        else:
            assert last < at, f"accounting: {last} is decided, and the next is {at}"
            until = at - ONE_MICROSECOND
            edge = max(schedule.grids[-1][0], at - ONE_MICROSECOND)
            grid = schedule.grids[-1][1]
            assert grid.between(edge, edge + timedelta(seconds=grid.step), schedule.made)[:1] == [at], (
                f"accounting: {at} is not an instant of {grid} created at {schedule.made}"
            )
    due: list[datetime] = []
    for (start, grid), (end, _) in zip(schedule.grids, [*schedule.grids[1:], (until, None)], strict=True):
        due += grid.between(start, min(end, until), schedule.made)
    left = [one for one in due if one not in decided]
    assert len(due) - len(left) == len(decided), f"accounting: {set(decided) - set(due)} are none of {schedule.name}"
    for row in ranges:
        assert row.to is not None
        inside = [one for one in left if row.scheduled_at <= one <= row.to]
        assert len(inside) == row.count, f"accounting: a range of {row.count} stands for {len(inside)}: {row}"
        left = [one for one in left if not row.scheduled_at <= one <= row.to]
    assert not left, f"accounting: {left[:3]} of {schedule.name} have no row, and the cursor is {cursor}"


def catch_up(schedule: ScheduleRecord, rows: list[Row]) -> None:
    """Catch-up creates no more jobs than its limit, and none older than its window."""
    window = timedelta(seconds=max(one["catch_up_window"] for one in schedule.given))
    at_once = Counter[datetime]()
    for row in rows:
        late = row.created_at - row.scheduled_at
        if row.kind == "planned" and row.state != "skipped" and row.replaces is None and late > MISSED_AFTER:
            assert late <= window, f"catch-up: it is older than {window}: {row}"
            at_once[row.created_at] += 1
    most = max(1 if one["catch_up"] == "latest" else one["catch_up_limit"] for one in schedule.given)
    assert all(count <= most for count in at_once.values()), f"catch-up: more than {most}: {at_once.most_common(1)}"


def paused(schedule: ScheduleRecord, rows: list[Row]) -> None:
    """Occurrences in a pause are skipped with that reason, unless it was resumed with catch-up."""
    for start, end, asked in schedule.pauses:
        assert start is not None
        for row in rows:
            if row.kind == "planned" and start < row.scheduled_at and asked is None:
                inside = end is None or row.scheduled_at <= end
                assert not inside or row.reason in ("paused", "override", "rescheduled"), f"paused: {row}"
    manual = [row for row in rows if row.kind == "manual" and row.reason != "rescheduled"]
    assert len(manual) == schedule.triggers, f"trigger: {schedule.triggers} calls, and there are {len(manual)} rows"


def final_state(model: Machine) -> None:
    """After all faults: due occurrences have fired or have a reason, and no job waits without one."""
    now, rows = model.world.now, model.rows()
    held = {
        (id_, one.attempt.number) for node in model.world.services for id_, one in node.node.running_attempts.items()
    }
    of: dict[str | None, list[Row]] = defaultdict(list)
    for row in rows:
        if row.state not in FINAL:
            of[row.schedule_id].append(row)
    for row in rows:
        if row.state == "running":
            assert (row.id, row.attempt) in held, f"stuck: no node runs {row}"
            over = any(
                one.ended == now for one in model.ledger.by_job.get(row.id, ())
            )  # its completion is about to be written
            assert over or any(one.job_id == row.id for one in model.ledger.open), f"stuck: {row} does not run"
        elif row.state == "pending" and row.hold is None:
            soon = row.run_at >= now - timedelta(seconds=1)
            assert soon or waits_for_room(model, row, rows), f"stuck: {row} is due, and it is {now}"
        elif row.state == "pending" and row.hold == "overlap":
            before = [one for one in of[row.schedule_id] if one.hold not in ("overlap", "backlog")]
            assert row.schedule_id is not None and before, f"stuck: no live predecessor of {row}"
        elif row.state == "pending" and row.hold == "group":
            concurrent = [
                one for one in rows if one.group == row.group and one.state not in FINAL and one.hold != "group"
            ]
            assert model.limits["concurrency_per_group"] and concurrent, f"stuck: no live group member before {row}"
        elif row.state == "pending":
            assert row.hold == "backlog", f"stuck: {row}"
    for id_, (at, enabled, _) in cursors(model.world).items():
        delay = any(one.id == id_ and one.grids[-1][1].kind == "delay" for one in model.schedules)
        if delay and at is None:
            assert any(one.hold != "backlog" for one in of[id_]), f"stuck: {id_} never fires again"
        elif enabled:
            assert at is not None and at >= now, f"stuck: {id_} was due at {at}, and it is {now}"
