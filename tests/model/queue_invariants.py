"""Invariants of queues: limits and pauses hold, and jobs with free capacity start immediately."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from tests.model.inputs import QUEUE
from tests.model.rows import Row, starts

if TYPE_CHECKING:
    from tests.model.machine import Machine

WRITE_DELAY = timedelta(seconds=120)  # a completion may be written this long after a fault
REACTION_TIME = timedelta(seconds=5 + 1)  # a heartbeat and a margin
START_DELAY = timedelta(seconds=30)  # a fault may delay the start of a job claimed this long before


def limits(model: Machine, by_id: dict[str, Row]) -> None:
    """The concurrency limits of the limited queue and its groups hold."""
    most, each = (model.limits[name] for name in ("concurrency", "concurrency_per_group"))
    narrow = [one for one in model.ledger.effects if by_id[one.job_id].queue == QUEUE]
    for effect in narrow:
        concurrent = [
            by_id[other.job_id]
            for other in effect.concurrent
            if by_id[other.job_id].queue == QUEUE and not model.ledger.excused(other, effect.began)
        ]
        assert most is None or len(concurrent) < most, f"limit: {effect} concurrent with {concurrent}"
        group = by_id[effect.job_id].group
        same = [row for row in concurrent if row.group == group is not None]
        assert each is None or len(same) < each, f"group: {effect} concurrent with {same}"


def rate(model: Machine, by_id: dict[str, Row]) -> None:
    """The rate of the limited queue holds, and jobs that did not start do not count."""
    most, per, now = model.limits["rate"], timedelta(seconds=model.limits["per"]), model.world.now
    if most is None:
        return
    began = [one.began for one in model.ledger.effects if by_id[one.job_id].queue == QUEUE]
    for first, last in zip(began, began[most:], strict=False):
        if last - first < per - model.claim_delay:
            assert model.ledger.any_fault(first - START_DELAY, last), f"rate: {most + 1} from {first} to {last}"
    left = any(at >= now - per - START_DELAY for at, _ in model.ledger.drains)
    if not left and not model.ledger.any_fault(now - per - START_DELAY, now):
        counted = sum(count for at, count in starts(model.world, QUEUE) if now - per < at <= now - model.claim_delay)
        seen = sum(at > now - per for at in began)
        assert counted <= seen, f"rate: {counted} starts are counted, and there were {seen} since {now - per}"


def halted(model: Machine, by_id: dict[str, Row]) -> None:
    """No job starts while its queue or everything is paused."""
    halts = [*model.queue_pauses, *((name, since, model.world.now) for name, since in model.paused_queues.items())]
    for queue, since, until in halts:
        for effect in model.ledger.effects:
            if since + model.claim_delay < effect.began < until and queue in ("*", by_id[effect.job_id].queue):
                assert model.ledger.had_fault(effect.node, since, effect.began), (
                    f"halted: {queue} at {since}, and {effect}"
                )


def waits_for_room(model: Machine, row: Row, rows: list[Row]) -> bool:
    """Return whether limits of its queue may prevent the claim of a due job."""
    if row.queue in model.paused_queues or "*" in model.paused_queues:
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
    """Without recent faults, startable jobs start immediately, or a heartbeat later without a notification."""
    now, before = model.world.now, model.waiting
    model.waiting = {}
    if (
        not model.world.nodes
        or model.rows_damaged
        or len(model.world.services) < len(model.world.nodes)  # a node is starting
        or now - model.clock_stepped_at < WRITE_DELAY
        or model.ledger.any_fault(now - WRITE_DELAY, now)
    ):
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
    if "*" not in model.paused_queues:
        for id_, (at, enabled, _) in moments.items():
            if enabled and at is not None and at < now:
                model.waiting[id_, None, at] = before.get((id_, None, at), now)
    for what, since in model.waiting.items():
        assert since >= now - REACTION_TIME, f"late: it is {now}, and {what} has waited since {since}"


def _ready_since(model: Machine, row: Row) -> datetime | None:
    """Return the instant from which a never blocked one-time job may start; None if unknown."""
    since = max(row.run_at, row.created_at)
    if model.claim_delay:  # a start takes time
        since = max(since, *model.world.started_at.values())
    free = row.queue != QUEUE and not any(until > since for _, _, until in model.queue_pauses)
    return since if free and row.schedule_id is None and row.attempt == 0 else None
