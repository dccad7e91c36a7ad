"""What must hold after every step, and at the end when all is healed. Each failure begins with the name of the rule."""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

from tests.model.ledger import MOMENT, PAUSE, RETRIES, SNOOZE, Effect
from tests.model.room import LATE, halted, limits, prompt, rate, waits_for_room
from tests.model.rows import Row, cursors, written

if TYPE_CHECKING:
    from tests.model.answers import Kept
    from tests.model.machine import Machine

MISSED = timedelta(seconds=60)
LEASE = timedelta(seconds=15 + 5 + 2 + 1)  # a lease, a heartbeat, the longest pause after a failure, and room
AGAIN = timedelta(seconds=3)  # the longest pause of a node after it did not reach the database, and room
FINAL = ("completed", "failed", "cancelled", "skipped")


def check(model: Machine) -> None:
    """All that must hold at any time."""
    rows = model.rows()
    by_id = {row.id: row for row in rows}
    assert len(by_id) == len(rows), "rows: a job is live and finished at once, or twice"
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
    sound_attempts(model, by_id)
    endings(model, by_id)
    requests(model, rows)
    cancelled(model)
    skips(model, rows, of)
    once(rows)
    moments = cursors(model.world)
    prompt(model, rows, moments)
    for kept in model.kept:
        if kept.grids[-1][1].kind != "delay":
            accounting(model, kept, of[kept.id], moments.get(kept.id))
            made_up_for(kept, of[kept.id])
        paused(kept, of[kept.id])
    assert all(fault is None for _, _, fault in moments.values()), "fault: a schedule was set aside"


def never_early(model: Machine, by_id: dict[str, Row]) -> None:
    """No attempt starts before its instant, nor before the time it was moved to."""
    for effect in model.ledger.effects:
        due = model.moved.get(effect.job_id, effect.scheduled_at)
        assert effect.began >= due, f"early: {effect}, due at {due}"
        shot = model.shots.get(effect.job_id)
        assert shot is None or effect.began >= shot.run_at, f"early: {effect}"


def keys(model: Machine, by_id: dict[str, Row]) -> None:
    """One occurrence has one key, and one key one occurrence; of a one-shot it is its id."""
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
    """A job is tried again only after a failure, or after what may have lost an attempt; under a higher number, and
    not before its pause is over."""
    ledger = model.ledger
    for job_id, calls in ledger.of.items():
        for one, two in pairwise(calls):
            assert two.attempt > one.attempt, f"fence: attempt {two.attempt} began after {one.attempt}: {two}"
            if job_id in model.replayed or ledger.excused(one, two.began):
                continue
            assert one.outcome in ("failed", "timeout", "snoozed"), f"again: {two} after {one}"
            assert one.ended is not None
            pause = SNOOZE if one.outcome == "snoozed" else PAUSE
            assert two.began >= one.ended + timedelta(seconds=pause), f"early: {two} after {one}"
        failed = [one for one in calls if one.outcome in ("failed", "timeout") and one.ended is not None]
        if len(failed) > RETRIES and job_id not in model.replayed:
            last = failed[-1]
            assert ledger.anything(failed[0].began, last.began + LATE), f"retry: failed {len(failed)} times: {last}"


def overlap(model: Machine, by_id: dict[str, Row]) -> None:
    """Of a schedule whose jobs take turns one runs at a time, unless the earlier one's node was lost; and none starts
    while another waits to be tried again."""
    for effect in model.ledger.effects:
        for other in effect.beside:
            if other.schedule_id is None or other.schedule_id != effect.schedule_id or other.job_id == effect.job_id:
                continue
            if all(takes_turns(model, by_id[one.job_id]) for one in (effect, other)):
                assert model.ledger.excused(other, effect.began), f"overlap: {effect} beside {other}"
    of: dict[str, list[Effect]] = defaultdict(list)
    for effect in model.ledger.effects:
        if effect.schedule_id is not None:
            of[effect.schedule_id].append(effect)
    for calls in of.values():
        before: dict[str, int] = {}  # where the attempt before is, of each job
        for at, two in enumerate(calls):
            since = before.get(two.job_id, at)
            before[two.job_id], one = at, calls[since]
            if one.ended is None or two.job_id in model.replayed:
                continue
            for effect in calls[since + 1 : at]:
                turns = effect.began >= one.ended and all(takes_turns(model, by_id[it.job_id]) for it in (effect, one))
                assert not turns or model.ledger.excused(one, two.began), f"overlap: {effect} while {one} waited"


def takes_turns(model: Machine, row: Row) -> bool:
    """Whether a job of a schedule was never one that runs beside others."""
    kept = next(one for one in model.kept if one.id == row.schedule_id)
    return row.serial and (kept.beside_until is None or row.created_at > kept.beside_until)


def sound_attempts(model: Machine, by_id: dict[str, Row]) -> None:
    """What runs on a sound node is its job's attempt; what runs on one that was cut off ends with its lease."""
    now = model.world.now
    for effect in model.ledger.open:
        if not model.ledger.excused(effect, now):
            row = by_id[effect.job_id]
            at = (row.state, row.attempt)
            assert at == ("running", effect.attempt), f"fence: {effect} runs, and its job is {row}"
        effect.cut = model.ledger.since_cut(effect.node)
    for effect in model.ledger.effects:
        assert effect.cut is None or effect.cut <= LEASE, f"lease: {effect} went on long after its node was cut off"


def endings(model: Machine, by_id: dict[str, Row]) -> None:
    """What a job says of its last attempt is what that attempt came to, and nobody else's."""
    ledger, now = model.ledger, model.world.now
    wrote = Counter(written(model.world))
    may = {one.id for one in model.kept if one.deleted is not None or "cancel_previous" in one.overlaps}
    for job_id, row in by_id.items():
        calls = ledger.of.get(job_id, ())
        last = calls[-1] if calls else None
        if row.state == "completed":
            done = [one for one in calls if one.attempt == row.attempt and one.outcome == "done"]
            within = [one for one in calls if one.plan["do"] == "within" and wrote[job_id]]
            assert done or within, f"lost: completed without its attempt {row.attempt}: {row}, {calls}"
            assert row.result == str(row.attempt), f"fence: completed by attempt {row.result}: {row}"
        elif row.state == "failed":
            expired = row.reason == "expired" and (row.finished_at or now) - row.scheduled_at >= MISSED
            assert expired or row.tries >= RETRIES, f"retry: failed after {row.tries} tries: {row}"
        elif row.state == "skipped":
            assert not calls, f"skipped: it ran: {row}"
        elif row.state == "cancelled":
            why = job_id in model.told or job_id in model.replaced or row.reason in _REASONS or row.schedule_id in may
            assert why or (row.reason == "discarded" and model.discarded), f"cancelled: nobody asked: {row}"
        settled = last is not None and last.ended is not None and last.ended < now
        quiet = last is not None and not ledger.befell(last.node, last.began - AGAIN, now)
        if last is not None and settled and last.outcome == "done" and quiet:
            assert row.state == "completed" and row.attempt == last.attempt, f"lost: {last} is done: {row}"
        assert wrote[job_id] <= (row.state == "completed"), f"within: {wrote[job_id]} rows written: {row}"


_REASONS = ("as planned",)


def requests(model: Machine, rows: list[Row]) -> None:
    """A request makes one job, however often it is sent."""
    made = Counter(row.metadata for row in rows if row.metadata is not None and row.replaces is None)
    assert not any(count > 1 for count in made.values()), f"request: {made.most_common(1)}"
    there = {row.id for row in rows}
    assert there.issuperset(model.shots), "lost: an acknowledged job is not there"


def cancelled(model: Machine) -> None:
    """Nothing starts after `prevented`, and no further attempt after `in_flight`; nothing of what was replaced."""
    for job_id, told in model.told.items():
        for effect in model.ledger.of.get(job_id, ())[told.calls :]:
            assert told.outcome != "prevented", f"prevented: and then {effect}"
            assert effect.attempt <= told.attempt, f"in_flight: and then {effect}"
    for job_id, (_, before) in model.replaced.items():
        for effect in model.ledger.of.get(job_id, ())[before:]:
            raise AssertionError(f"prevented: it was moved, and then {effect}")
    gone = {one.id: one.deleted for one in model.kept if one.deleted is not None}
    for effect in model.ledger.effects:
        deleted = gone.get(effect.schedule_id or "")
        if deleted is not None and effect.began > deleted and effect.job_id not in model.replayed:
            assert model.ledger.befell(effect.node, deleted, effect.began), f"deleted: and then {effect}"


def skips(model: Machine, rows: list[Row], of: dict[str, list[Row]]) -> None:
    """What was skipped has a reason that is true."""
    for row in rows:
        if row.state != "skipped":
            continue
        assert row.finished_at is not None
        late = row.finished_at - row.scheduled_at
        if row.reason == "expired" and row.replaces is not None:
            continue  # it was moved, and what was left of its time with it
        if row.reason in ("missed", "coalesced", "expired"):
            assert late >= MISSED, f"skipped: {row.reason}, only {late} late: {row}"
        elif row.reason == "overlap" and not model.ledger.anything(row.finished_at - LATE, row.finished_at):
            assert any(
                (one.state != "skipped" or one.reason == "expired")
                and one.id != row.id
                and one.created_at <= row.finished_at <= (one.finished_at or row.finished_at)
                for one in of[row.schedule_id or ""]
            ), f"skipped: nothing was in its way: {row}"
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
    model: Machine, kept: Kept, rows: list[Row], cursor: tuple[datetime | None, bool, str | None] | None
) -> None:
    """Every occurrence up to the cursor has one row, or is in a range; nothing else has; the cursor is the next one."""
    planned = [row for row in rows if row.kind == "planned" and row.reason != "rescheduled"]
    decided = Counter(row.scheduled_at for row in planned if row.count == 1)
    ranges = [row for row in planned if row.count > 1]
    assert all(count == 1 for count in decided.values()), f"accounting: two rows of {decided.most_common(1)}"
    last = max([*decided, *(row.to or row.scheduled_at for row in ranges)], default=kept.made)
    if kept.deleted is not None:
        assert cursor is None, f"deleted: {kept.name} is there"
        until = kept.deleted
    else:
        assert cursor is not None, f"lost: {kept.name} is gone"
        at, _, _ = cursor
        if at is None:
            assert kept.wounded, f"accounting: {kept.name} has no next instant"
            until = last
        else:
            assert last < at, f"accounting: {last} is decided, and the next is {at}"
            until = at - MOMENT
            edge = max(kept.grids[-1][0], at - MOMENT)
            grid = kept.grids[-1][1]
            assert grid.between(edge, edge + timedelta(seconds=grid.step), kept.made)[:1] == [at], (
                f"accounting: {at} is not an instant of {grid} made at {kept.made}"
            )
    due: list[datetime] = []
    for (start, grid), (end, _) in zip(kept.grids, [*kept.grids[1:], (until, None)], strict=True):
        due += grid.between(start, min(end, until), kept.made)
    left = [one for one in due if one not in decided]
    assert len(due) - len(left) == len(decided), f"accounting: {set(decided) - set(due)} are none of {kept.name}"
    for row in ranges:
        assert row.to is not None
        inside = [one for one in left if row.scheduled_at <= one <= row.to]
        assert len(inside) == row.count, f"accounting: a range of {row.count} stands for {len(inside)}: {row}"
        left = [one for one in left if not row.scheduled_at <= one <= row.to]
    assert not left, f"accounting: {left[:3]} of {kept.name} have no row, and the cursor is {cursor}"


def made_up_for(kept: Kept, rows: list[Row]) -> None:
    """Of what was missed no more is made up for than was asked, and nothing older."""
    window = timedelta(seconds=max(one["catch_up_window"] for one in kept.given))
    at_once = Counter[datetime]()
    for row in rows:
        late = row.created_at - row.scheduled_at
        if row.kind == "planned" and row.state != "skipped" and row.replaces is None and late > MISSED:
            assert late <= window, f"catch-up: it is older than {window}: {row}"
            at_once[row.created_at] += 1
    most = max(1 if one["catch_up"] == "latest" else one["catch_up_limit"] for one in kept.given)
    assert all(count <= most for count in at_once.values()), f"catch-up: more than {most}: {at_once.most_common(1)}"


def paused(kept: Kept, rows: list[Row]) -> None:
    """What fell into a pause is skipped and says so, unless the catch-up was asked."""
    for start, end, asked in kept.pauses:
        assert start is not None
        for row in rows:
            if row.kind == "planned" and start < row.scheduled_at and asked is None:
                inside = end is None or row.scheduled_at <= end
                assert not inside or row.reason in ("paused", "override", "rescheduled"), f"paused: {row}"
    manual = [row for row in rows if row.kind == "manual" and row.reason != "rescheduled"]
    assert len(manual) == kept.triggers, f"trigger: asked {kept.triggers} times, and there are {len(manual)} rows"


def at_the_end(model: Machine) -> None:
    """All healed and time passed: what was due has fired or says why not, and nothing waits without a reason."""
    now, rows = model.world.now, model.rows()
    held = {(id_, one.attempt.number) for node in model.world.services for id_, one in node.node.held.items()}
    of: dict[str | None, list[Row]] = defaultdict(list)
    for row in rows:
        if row.state not in FINAL:
            of[row.schedule_id].append(row)
    for row in rows:
        if row.state == "running":
            assert (row.id, row.attempt) in held, f"stuck: nobody runs {row}"
            over = any(one.ended == now for one in model.ledger.of.get(row.id, ()))  # it is about to be written
            assert over or any(one.job_id == row.id for one in model.ledger.open), f"stuck: {row} does not run"
        elif row.state == "pending" and row.hold is None:
            soon = row.run_at >= now - timedelta(seconds=1)
            assert soon or waits_for_room(model, row, rows), f"stuck: {row} is due, and it is {now}"
        elif row.state == "pending" and row.hold == "overlap":
            before = [one for one in of[row.schedule_id] if one.hold not in ("overlap", "recover")]
            assert row.schedule_id is not None and before, f"stuck: nothing is before {row}"
        elif row.state == "pending" and row.hold == "group":
            beside = [one for one in rows if one.group == row.group and one.state not in FINAL and one.hold != "group"]
            assert model.limits["concurrency_per_group"] and beside, f"stuck: nobody of its group is before {row}"
        elif row.state == "pending":
            assert row.hold == "recover", f"stuck: {row}"
    for id_, (at, enabled, _) in cursors(model.world).items():
        delay = any(one.id == id_ and one.grids[-1][1].kind == "delay" for one in model.kept)
        if delay and at is None:
            assert any(one.hold != "recover" for one in of[id_]), f"stuck: {id_} never fires again"
        elif enabled:
            assert at is not None and at >= now, f"stuck: {id_} was due at {at}, and it is {now}"
