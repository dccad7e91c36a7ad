"""Hot statements of attempts: complete, schedule a retry, dispatch to external workers, renew leases.

Each batch is one statement. Every write is fenced: it applies only if the attempt number and the state of the row are
still those of the attempt. Otherwise the attempt has ended, perhaps reclaimed by another node, and the row is left
unchanged.

With `skip_locked`, rows that another transaction has locked are left unchanged, too, so that a stuck session cannot
delay the whole batch. Callers find these attempts with `find_unchanged`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from timebell.model.job import Completion, JobState
from timebell.store.jobs import groups
from timebell.store.schema import jobs
from timebell.store.statement import SplitStatement, Statement
from timebell.store.transaction import JOBS, Row, Transaction
from timebell.store.types import to_micros

_LIVE_ONLY_COLUMNS = {"route", "hold", "heartbeat", "cancel_requested", "shared", "charged"}
_CARRIED_COLUMNS = [column.name for column in jobs.columns if column.name not in _LIVE_ONLY_COLUMNS]
_COMPLETION_TYPES = {
    "id": "id", "attempt": "int", "was": "text", "state": "text", "at": "instant", "reason": "text",
    "error": "text", "code": "text", "result": "text", "errors": "text", "counts": "int", "cancel": "text",
    "replaced_by": "id",
}  # fmt: skip
_RETURNED_COLUMNS = "id, schedule_id, started_at, serial, queue, tenant_id, group_name"
_COPIED_COLUMNS = [name for name in _CARRIED_COLUMNS if name not in ("state", "errors", "attempts_used")]
_FENCE = "j.id = d.id AND j.attempt = d.attempt AND j.state = d.was"
# Repeats the join condition in a form that forces look-ups by id: for a join alone the planner may scan the table.
_ID_IN_BATCH = "j.id $in SELECT id FROM d $end_in"
# The same, without the rows that another transaction has locked.
_UNLOCKED_IN_BATCH = "j.$row_id $in $select_unlocked $end_in"
# If a cancel was requested while the attempt ran, only a success is kept; any other outcome becomes `cancelled`.
_FINAL_STATE = "CASE WHEN j.cancel_requested AND d.state <> 'completed' THEN 'cancelled' ELSE d.state END"
_FINISHED_VALUES = (
    ", ".join(f"j.{name}" for name in _COPIED_COLUMNS)
    + f", {_FINAL_STATE} AS state, d.errors, j.attempts_used + d.counts AS attempts_used, d.at, d.reason, d.error,"
    " d.code, d.result, CASE WHEN j.cancel_requested THEN 'in_flight' ELSE d.cancel END AS cancel, d.replaced_by"
)
_INSERT_FINISHED = (
    f"INSERT INTO timebell_finished ({', '.join(_COPIED_COLUMNS)}, state, errors, attempts_used, finished_at, reason,"
    " error, error_code, result, cancel, replaced_by)"
)
COMPLETE = Statement(
    f"WITH $rows, gone AS (DELETE FROM timebell_jobs j USING d WHERE {_FENCE} AND {_ID_IN_BATCH}"  # noqa: S608
    f" RETURNING {_FINISHED_VALUES}) {_INSERT_FINISHED} SELECT * FROM gone RETURNING {_RETURNED_COLUMNS}",
    **_COMPLETION_TYPES,
)
_RETURNED_JSON = ", ".join(f"'{name}', j.{name}" for name in _RETURNED_COLUMNS.split(", "))
_COPY_TO_FINISHED = (
    f"WITH $rows {_INSERT_FINISHED} SELECT {_FINISHED_VALUES} FROM d CROSS JOIN timebell_jobs j ON {_FENCE}"  # noqa: S608
)
COPY_COMPLETED = Statement(
    f"{_COPY_TO_FINISHED} RETURNING {_RETURNED_COLUMNS}",
    SplitStatement(
        f"WITH $rows SELECT json_group_array(json_object({_RETURNED_JSON})), NULL"  # noqa: S608
        f" FROM d CROSS JOIN timebell_jobs j ON {_FENCE}",
        _COPY_TO_FINISHED,
    ),
    **_COMPLETION_TYPES,
)


def _skip_locked_variant(statement: Statement) -> Statement:
    """Return a variant of a statement that skips rows locked by another transaction instead of waiting."""
    text = statement.template.template
    assert _ID_IN_BATCH in text
    return Statement(text.replace(_ID_IN_BATCH, _UNLOCKED_IN_BATCH), **statement.columns)


COMPLETE_UNLOCKED = _skip_locked_variant(COMPLETE)
SELECT_UNLOCKED = Statement(
    "WITH $rows SELECT id FROM timebell_jobs WHERE id $in SELECT id FROM d $end_in $skip_locked", id="id"
)
DELETE_COPIED = Statement("WITH $rows DELETE FROM timebell_jobs WHERE id $in SELECT id FROM d $end_in", id="id")


_OPTIONAL_FIELDS = ("reason", "error", "code", "result", "errors", "cancel", "replaced_by")
_optional_values = attrgetter(*_OPTIONAL_FIELDS)
_NO_OPTIONAL_VALUES = (None,) * len(_OPTIONAL_FIELDS)


def _completion_row(tx: Transaction, completion: Completion) -> dict[str, Any]:
    """Return a completion as a row of a batch. Enum members become plain strings, which drivers bind directly."""
    to_db = tx.dialect.to_db
    row = {
        "id": completion.id, "attempt": completion.attempt, "was": completion.expected_state._value_,
        "state": completion.state._value_,
        "at": to_db(completion.at), "counts": 1 if completion.uses_attempt else 0,
        "run_at": None if completion.run_at is None else to_db(completion.run_at),
    }  # fmt: skip
    optional = _optional_values(completion)
    if optional != _NO_OPTIONAL_VALUES:  # most completions have none; a missing value is NULL
        row |= {name: value for name, value in zip(_OPTIONAL_FIELDS, optional, strict=True) if value is not None}
    return row


def complete_jobs(tx: Transaction, completions: Sequence[Completion], *, skip_locked: bool = False) -> list[Row]:
    """Move completed jobs to `finished`, and release the next jobs of their groups.

    A single statement moves the rows if the dialect supports DELETE in a CTE. Returns the rows of the jobs whose fence
    held, with the columns id, schedule_id, started_at, serial, queue, tenant_id and group_name.
    """
    groups.lock_queues(tx, completions)
    rows = [_completion_row(tx, completion) for completion in completions]
    if tx.dialect.delete_in_cte:
        moved = tx.fetch(COMPLETE_UNLOCKED if skip_locked else COMPLETE, rows)
    else:
        if skip_locked:  # INSERT .. SELECT cannot skip locked rows and would wait
            unlocked = {str(row["id"]) for row in tx.fetch(SELECT_UNLOCKED, [{"id": row["id"]} for row in rows])}
            rows = [row for row in rows if row["id"] in unlocked]
        moved = tx.fetch(COPY_COMPLETED, rows) if rows else []
        if moved:
            tx.fetch(DELETE_COPIED, [{"id": row["id"]} for row in moved])
    groups.release_next(tx, moved)
    return moved


RETRY = Statement(
    f"WITH $rows UPDATE timebell_jobs AS j SET state = 'pending', run_at = d.run_at, errors = d.errors,"  # noqa: S608
    f" attempts_used = j.attempts_used + d.counts, node_id = NULL FROM d WHERE {_FENCE} AND {_ID_IN_BATCH}"
    " AND NOT j.cancel_requested RETURNING $updated_id, queue, tenant_id, group_name",
    **_COMPLETION_TYPES,
    run_at="instant",
)
RETRY_UNLOCKED = _skip_locked_variant(RETRY)


def schedule_retries(tx: Transaction, completions: Sequence[Completion], *, skip_locked: bool = False) -> set[str]:
    """Return attempts to `pending`, due at their `run_at`; return the ids of those whose fence held.

    Attempts with a requested cancel are left unchanged. The next jobs of their groups are released.
    """
    groups.lock_queues(tx, completions)
    retried = tx.fetch(
        RETRY_UNLOCKED if skip_locked else RETRY, [_completion_row(tx, completion) for completion in completions]
    )
    groups.release_next(tx, retried)
    if retried:
        tx.notify(JOBS)  # no node knows when it is due
    return {str(row["id"]) for row in retried}


DISPATCH = Statement(
    "WITH $rows UPDATE timebell_jobs AS j SET state = 'dispatched', heartbeat = d.until,"  # noqa: S608
    f" errors = COALESCE(d.errors, j.errors) FROM d WHERE {_FENCE} AND {_ID_IN_BATCH} RETURNING $updated_id",
    id="id",
    attempt="int",
    was="text",
    until="int",
    errors="text",
)


DISPATCH_UNLOCKED = _skip_locked_variant(DISPATCH)


def dispatch(tx: Transaction, completions: Sequence[Completion], *, skip_locked: bool = False) -> set[str]:
    """Dispatch attempts to external workers, which must report until `run_at`; return the ids whose fence held.

    In state `dispatched` the column `heartbeat` holds that deadline, in microseconds since 1970.
    """
    rows = [
        {
            "id": completion.id,
            "attempt": completion.attempt,
            "was": completion.expected_state,
            "until": to_micros(completion.run_at),
            "errors": completion.errors,
        }
        for completion in completions
        if completion.run_at is not None
    ]
    return {str(row["id"]) for row in tx.fetch(DISPATCH_UNLOCKED if skip_locked else DISPATCH, rows)}


RENEW_LEASES = Statement(
    "WITH $rows UPDATE timebell_jobs AS j SET heartbeat = j.heartbeat + 1 FROM d WHERE j.id = d.id"  # noqa: S608
    f" AND j.attempt = d.attempt AND j.state = 'running' AND {_ID_IN_BATCH} RETURNING $updated_id",
    id="id",
    attempt="int",
)


RENEW_LEASES_UNLOCKED = _skip_locked_variant(RENEW_LEASES)


def renew_leases(tx: Transaction, attempts: Sequence[tuple[str, int]], *, skip_locked: bool = False) -> set[str]:
    """Renew the leases of running attempts (id, number); return the ids whose fence held.

    A lease is a counter that must keep changing. Observers judge its age by their own monotonic clocks.
    """
    rows = [{"id": id_, "attempt": number} for id_, number in attempts]
    return {str(row["id"]) for row in tx.fetch(RENEW_LEASES_UNLOCKED if skip_locked else RENEW_LEASES, rows)}


UNCHANGED_ATTEMPTS = Statement(
    f"WITH $rows SELECT j.id, j.cancel_requested FROM d JOIN timebell_jobs j ON {_FENCE} WHERE {_ID_IN_BATCH}",  # noqa: S608
    id="id",
    attempt="int",
    was="text",
)


def find_unchanged(tx: Transaction, attempts: Sequence[tuple[str, int, JobState]]) -> dict[str, bool]:
    """Find those of these attempts (id, number, state) whose fence still holds; return "cancel requested" by id.

    For attempts that a `skip_locked` statement did not write: if the fence holds, their rows were only locked.
    """
    rows = [{"id": id_, "attempt": number, "was": str(state)} for id_, number, state in attempts]
    return {str(row["id"]): bool(row["cancel_requested"]) for row in tx.fetch(UNCHANGED_ATTEMPTS, rows)}
