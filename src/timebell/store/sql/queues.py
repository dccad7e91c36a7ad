"""Queues: named lanes with a limit and a pause. A queue without a row has neither."""

from __future__ import annotations

from sqlalchemy import insert, select, update

from timebell.store.schema import queues
from timebell.store.transaction import Transaction

EVERYTHING = "*"  # the row whose pause stops planning and claiming altogether


def put(tx: Transaction, name: str, concurrency: int | None) -> None:
    """Set how many jobs of a queue may run at once over all nodes (None: no limit)."""
    _write(tx, name, concurrency=concurrency)


def pause(tx: Transaction, name: str, reason: str | None) -> None:
    """Claim no more jobs of a queue; those that run go on."""
    _write(tx, name, paused=True, pause_reason=reason)


def resume(tx: Transaction, name: str) -> None:
    """Claim its jobs again."""
    _write(tx, name, paused=False, pause_reason=None)
    tx.notify()


def stopped(tx: Transaction) -> bool:
    """Whether the switch that stops everything is set."""
    everything = select(queues.c.paused).where(queues.c.name == EVERYTHING)
    return bool(tx.execute(everything).scalar())


def _write(tx: Transaction, name: str, **values: object) -> None:
    tx.execute(select(queues).where(queues.c.name == name).with_for_update())
    if tx.execute(update(queues).where(queues.c.name == name).values(**values)).rowcount == 0:
        tx.execute(insert(queues).values(name=name, **values))
