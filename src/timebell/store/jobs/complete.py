"""How attempts leave: they end, are tried again, or are left to outside workers; and the beats that keep them.

Each batch is one statement; the fence (attempt number, state) guards every write.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from timebell.model.job import Ending, JobState
from timebell.store.jobs import groups
from timebell.store.schema import jobs
from timebell.store.statement import InTwo, Statement
from timebell.store.transaction import Row, Transaction
from timebell.store.types import to_micros

_DERIVED = {"route", "hold", "beat", "cancel_asked", "shared", "charged"}
_CARRIED = [column.name for column in jobs.columns if column.name not in _DERIVED]
_ENDING = {
    "id": "id", "attempt": "int", "was": "text", "state": "text", "at": "instant", "reason": "text",
    "error": "text", "code": "text", "result": "text", "errors": "text", "counts": "int", "cancel": "text",
    "replaced_by": "id",
}  # fmt: skip
_LEFT = "id, schedule_id, started_at, serial, queue, tenant_id, group_name"
_MOVED = [name for name in _CARRIED if name not in ("state", "errors", "tries")]
_GUARD = "j.id = d.id AND j.attempt = d.attempt AND j.state = d.was"
# Said once more in the form that pins look-ups by id: of a join alone the planner may make a scan of the table.
_PINNED = "j.id $pick SELECT id FROM d $picked"
# The same, but for those whose rows another transaction has locked.
_UNLOCKED = "j.$place $pick $unlocked $picked"
# A cancel that was asked while it ran: only a success still counts as one.
_STATE = "CASE WHEN j.cancel_asked AND d.state <> 'completed' THEN 'cancelled' ELSE d.state END"
_VALUES = (
    ", ".join(f"j.{name}" for name in _MOVED)
    + f", {_STATE} AS state, d.errors, j.tries + d.counts AS tries, d.at, d.reason, d.error, d.code, d.result,"
    " CASE WHEN j.cancel_asked THEN 'in_flight' ELSE d.cancel END AS cancel, d.replaced_by"
)
_INTO = (
    f"INSERT INTO timebell_finished ({', '.join(_MOVED)}, state, errors, tries, finished_at, reason, error,"
    " error_code, result, cancel, replaced_by)"
)
END = Statement(
    f"WITH $rows, gone AS (DELETE FROM timebell_jobs j USING d WHERE {_GUARD} AND {_PINNED}"  # noqa: S608
    f" RETURNING {_VALUES}) {_INTO} SELECT * FROM gone RETURNING {_LEFT}",
    **_ENDING,
)
_COPIED = ", ".join(f"'{name}', j.{name}" for name in _LEFT.split(", "))
_COPY = f"WITH $rows {_INTO} SELECT {_VALUES} FROM d CROSS JOIN timebell_jobs j ON {_GUARD}"  # noqa: S608
COPY_ENDED = Statement(
    f"{_COPY} RETURNING {_LEFT}",
    InTwo(
        f"WITH $rows SELECT json_group_array(json_object({_COPIED})), NULL"  # noqa: S608
        f" FROM d CROSS JOIN timebell_jobs j ON {_GUARD}",
        _COPY,
    ),
    **_ENDING,
)


def _skipping(waiting: Statement) -> Statement:
    """The same for what is not locked by another transaction, so that nobody waits for that."""
    text = waiting.template.template
    assert _PINNED in text
    return Statement(text.replace(_PINNED, _UNLOCKED), **waiting.columns)


END_UNLOCKED = _skipping(END)
UNLOCKED = Statement(
    "WITH $rows SELECT id FROM timebell_jobs WHERE id $pick SELECT id FROM d $picked $skip_locked", id="id"
)
DELETE_COPIED = Statement("WITH $rows DELETE FROM timebell_jobs WHERE id $pick SELECT id FROM d $picked", id="id")


_OPTIONAL = ("reason", "error", "code", "result", "errors", "cancel", "replaced_by")
_optional = attrgetter(*_OPTIONAL)
_NONE_OF_THEM = (None,) * len(_OPTIONAL)


def _ending_row(tx: Transaction, ending: Ending) -> dict[str, Any]:
    """An ending as a row of a batch; its words as plain text, which drivers bind at once."""
    to_db = tx.dialect.to_db
    row = {
        "id": ending.id, "attempt": ending.attempt, "was": ending.was._value_, "state": ending.state._value_,
        "at": to_db(ending.at), "counts": 1 if ending.counts else 0,
        "run_at": None if ending.run_at is None else to_db(ending.run_at),
    }  # fmt: skip
    optional = _optional(ending)
    if optional != _NONE_OF_THEM:  # as most endings are; and what is left out is NULL
        row |= {name: value for name, value in zip(_OPTIONAL, optional, strict=True) if value is not None}
    return row


def end(tx: Transaction, endings: Sequence[Ending], *, skip: bool = False) -> list[Row]:
    """Move jobs to `finished`, in one statement where the dialect can, and let the next of their groups go; of those
    whose fence still held the id, schedule_id, started_at, and whether they take turns by now. With `skip` those whose
    rows are locked are left as they are."""
    groups.lock(tx, endings)
    rows = [_ending_row(tx, ending) for ending in endings]
    if tx.dialect.delete_in_cte:
        left = tx.fetch(END_UNLOCKED if skip else END, rows)
    else:
        if skip:  # an INSERT that reads what it writes would wait
            free = {str(row["id"]) for row in tx.fetch(UNLOCKED, [{"id": row["id"]} for row in rows])}
            rows = [row for row in rows if row["id"] in free]
        left = tx.fetch(COPY_ENDED, rows) if rows else []
        if left:
            tx.fetch(DELETE_COPIED, [{"id": row["id"]} for row in left])
    groups.let_go(tx, left)
    return left


RETRY = Statement(
    f"WITH $rows UPDATE timebell_jobs AS j SET state = 'pending', run_at = d.run_at, errors = d.errors,"  # noqa: S608
    f" tries = j.tries + d.counts, node_id = NULL FROM d WHERE {_GUARD} AND {_PINNED}"
    " AND NOT j.cancel_asked RETURNING $own_id, queue, tenant_id, group_name",
    **_ENDING,
    run_at="instant",
)
RETRY_UNLOCKED = _skipping(RETRY)


def retry(tx: Transaction, endings: Sequence[Ending], *, skip: bool = False) -> set[str]:
    """Put attempts back to pending at their `run_at`; not those whose cancel was asked or fence is old, nor, with
    `skip`, those whose rows are locked."""
    groups.lock(tx, endings)
    left = tx.fetch(RETRY_UNLOCKED if skip else RETRY, [_ending_row(tx, ending) for ending in endings])
    groups.let_go(tx, left)
    return {str(row["id"]) for row in left}


DISPATCH = Statement(
    "WITH $rows UPDATE timebell_jobs AS j SET state = 'dispatched', beat = d.until,"  # noqa: S608
    f" errors = COALESCE(d.errors, j.errors) FROM d WHERE {_GUARD} AND {_PINNED} RETURNING $own_id",
    id="id",
    attempt="int",
    was="text",
    until="int",
    errors="text",
)


DISPATCH_UNLOCKED = _skipping(DISPATCH)


def dispatch(tx: Transaction, handed: Sequence[Ending], *, skip: bool = False) -> set[str]:
    """Leave attempts to outside workers until their `run_at`; the ids whose fence still held, without those whose rows
    are locked if they are to be skipped.

    From here on `beat` is that instant, in microseconds since 1970.
    """
    rows = [
        {"id": one.id, "attempt": one.attempt, "was": one.was, "until": to_micros(one.run_at), "errors": one.errors}
        for one in handed
        if one.run_at is not None
    ]
    return {str(row["id"]) for row in tx.fetch(DISPATCH_UNLOCKED if skip else DISPATCH, rows)}


BEAT = Statement(
    "WITH $rows UPDATE timebell_jobs AS j SET beat = j.beat + 1 FROM d WHERE j.id = d.id AND j.attempt = d.attempt"  # noqa: S608
    f" AND j.state = 'running' AND {_PINNED} RETURNING $own_id",
    id="id",
    attempt="int",
)


BEAT_UNLOCKED = _skipping(BEAT)


def beat(tx: Transaction, attempts: Sequence[tuple[str, int]], *, skip: bool = False) -> set[str]:
    """Renew the leases of these attempts (id, number); the ids still ours, without those whose rows are locked if they
    are to be skipped."""
    rows = [{"id": id_, "attempt": number} for id_, number in attempts]
    return {str(row["id"]) for row in tx.fetch(BEAT_UNLOCKED if skip else BEAT, rows)}


STILL = Statement(
    f"WITH $rows SELECT j.id, j.cancel_asked FROM d JOIN timebell_jobs j ON {_GUARD} WHERE {_PINNED}",  # noqa: S608
    id="id",
    attempt="int",
    was="text",
)


def still(tx: Transaction, attempts: Sequence[tuple[str, int, JobState]]) -> dict[str, bool]:
    """Of attempts (id, number, state) that were not written, those that are as they were: another transaction had
    locked their rows. And whether their cancel was asked."""
    rows = [{"id": id_, "attempt": number, "was": str(was)} for id_, number, was in attempts]
    return {str(row["id"]): bool(row["cancel_asked"]) for row in tx.fetch(STILL, rows)}
