"""What must hold of queues: their limits and pauses are kept, and what has room starts at once."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from tests.model.plans import QUEUE
from tests.model.rows import Row, starts

if TYPE_CHECKING:
    from tests.model.machine import Machine

LATE = timedelta(seconds=120)  # for so long an ending may have waited to be written, after a fault
SOON = timedelta(seconds=5 + 1)  # a heartbeat, and room
HELD_UP = timedelta(seconds=30)  # so long before a fault may have kept what was claimed from beginning


def limits(model: Machine, by_id: dict[str, Row]) -> None:
    """In the queue with limits no more run at once, also of a group, than it allows."""
    most, each = (model.limits[name] for name in ("concurrency", "concurrency_per_group"))
    narrow = [one for one in model.ledger.effects if by_id[one.job_id].queue == QUEUE]
    for effect in narrow:
        beside = [
            by_id[other.job_id]
            for other in effect.beside
            if by_id[other.job_id].queue == QUEUE and not model.ledger.excused(other, effect.began)
        ]
        assert most is None or len(beside) < most, f"limit: {effect} beside {beside}"
        group = by_id[effect.job_id].group
        same = [row for row in beside if row.group == group is not None]
        assert each is None or len(same) < each, f"group: {effect} beside {same}"


def rate(model: Machine, by_id: dict[str, Row]) -> None:
    """In the queue with limits no more start in a time than its rate allows, and what did not start counts for none."""
    most, per, now = model.limits["rate"], timedelta(seconds=model.limits["per"]), model.world.now
    if most is None:
        return
    began = [one.began for one in model.ledger.effects if by_id[one.job_id].queue == QUEUE]
    for first, last in zip(began, began[most:], strict=False):
        if last - first < per:
            assert model.ledger.anything(first - HELD_UP, last), f"rate: {most + 1} from {first} to {last}"
    left = any(at >= now - per - HELD_UP for at, _ in model.ledger.left)
    if not left and not model.ledger.anything(now - per - HELD_UP, now):
        counted = sum(count for at, count in starts(model.world, QUEUE) if at > now - per)
        seen = sum(at > now - per for at in began)
        assert counted <= seen, f"rate: {counted} starts are counted, and there were {seen} since {now - per}"


def halted(model: Machine, by_id: dict[str, Row]) -> None:
    """Nothing starts while its queue is paused, or everything is."""
    halts = [*model.halts, *((name, since, model.world.now) for name, since in model.halted.items())]
    for queue, since, until in halts:
        for effect in model.ledger.effects:
            if since < effect.began < until and queue in ("*", by_id[effect.job_id].queue):
                assert model.ledger.befell(effect.node, since, effect.began), (
                    f"halted: {queue} at {since}, and {effect}"
                )


def waits_for_room(model: Machine, row: Row, rows: list[Row]) -> bool:
    """Whether the limits of its queue may keep a job that is due from being claimed."""
    if row.queue in model.halted or "*" in model.halted:
        return True
    if row.queue != QUEUE:
        return False
    most, each, rate = (model.limits[name] for name in ("concurrency", "concurrency_per_group", "rate"))
    running = [one for one in rows if one.state == "running" and one.queue == QUEUE]
    since = model.world.now - timedelta(seconds=model.limits["per"] + 1)
    started = sum(row.began >= since for row in model.ledger.effects)
    return (
        (most is not None and len(running) >= most)
        or (rate is not None and started >= rate)
        or (each is not None and sum(one.group == row.group is not None for one in running) >= each)
    )


def prompt(model: Machine, rows: list[Row], moments: dict[str, tuple[datetime | None, bool, str | None]]) -> None:
    """While all is quiet, and has been for a while, what may start does so at once; a heartbeat later if nobody heard
    of it."""
    now, before = model.world.now, model.waiting
    model.waiting = {}
    if not model.world.nodes or model.harmed or now - model.stepped < LATE or model.ledger.anything(now - LATE, now):
        return
    pending = [row for row in rows if row.state == "pending"]
    live = [row for row in rows if row.state == "running"] + [row for row in pending if row.hold is None]
    turns, groups = {row.schedule_id for row in live}, {(row.queue, row.group) for row in live}
    for row in pending:
        due = row.hold is None and row.run_at < now and not waits_for_room(model, row, rows)
        next_in_turn = row.hold == "overlap" and row.schedule_id not in turns
        if due or next_in_turn or (row.hold == "group" and (row.queue, row.group) not in groups):
            what = row.id, row.hold, row.run_at
            model.waiting[what] = _ready_since(model, row) or before.get(what, now)
    if "*" not in model.halted:
        for id_, (at, enabled, _) in moments.items():
            if enabled and at is not None and at < now:
                model.waiting[id_, None, at] = before.get((id_, None, at), now)
    for what, since in model.waiting.items():
        assert since >= now - SOON, f"late: it is {now}, and {what} waits since {since}"


def _ready_since(model: Machine, row: Row) -> datetime | None:
    """Since when a one-shot may start that nothing was ever in the way of; None where that is not known."""
    since = max(row.run_at, row.created_at)
    free = row.queue != QUEUE and not any(until > since for _, _, until in model.halts)
    return since if free and row.schedule_id is None and row.attempt == 0 else None
