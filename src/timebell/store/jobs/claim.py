"""The hot statements of jobs that are pending and claimed: create, look, claim. How attempts leave is in `endings`.

Each batch is one statement.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from sqlalchemy import Column

from timebell.model.job import Alike, Attempt, JobState, NewJob
from timebell.model.limits import next_start
from timebell.model.payload import decode
from timebell.model.routes import Routes
from timebell.store.schema import jobs
from timebell.store.statement import InTwo, Statement
from timebell.store.transaction import Row, Transaction
from timebell.store.types import EPOCH, from_micros, to_micros

_TYPES = {
    "String": "text", "Text": "text", "Integer": "int", "SmallInteger": "int", "BigInteger": "int",
    "Float": "real", "Boolean": "bool", "Instant": "instant", "Id": "id",
}  # fmt: skip
# Written only where a job has one: most have none, and every column read from JSON costs.
_RARE = ("local_time", "tzdata", "group_name", "conditions")
_LATER = ("node_id", "started_at", "errors", "beat", "cancel_asked", "shared", "replays", "charged")
_NEW_RARE = [column for column in jobs.columns if column.name not in _LATER]
_NEW = [column for column in _NEW_RARE if column.name not in _RARE]
_NEW_NAMES = [column.name for column in _NEW]


@dataclass(slots=True)
class Lane:
    """A (queue, priority) with pending jobs: when its first is due, and what room its queue has left.

    The rate of its queue lets none start before `free_at`. It is `crowded` when it is late and several tenants have
    jobs in it. `later` is when the first of it is due that is not yet.
    """

    queue: str
    priority: int
    next_due: datetime | None
    room: int | None
    limited: bool
    free_at: datetime | None = None
    crowded: bool = False
    later: datetime | None = None

    @property
    def starts_at(self) -> datetime | None:
        """When a job of it may start: it is due, and the rate lets it."""
        return self.next_due if self.next_due is None or self.free_at is None else max(self.next_due, self.free_at)


# A job made while `default` is the only tenant is in nobody's way who could be told apart from it.
_SHARED = "(tenant_id <> 'default' OR EXISTS (SELECT 1 FROM timebell_tenants t WHERE t.id <> 'default'))"


def _create(columns: Sequence[Column[Any]], returning: str = "", where: str = "true") -> Statement:
    names = ", ".join(column.name for column in columns)
    return Statement(
        f"WITH $rows INSERT INTO timebell_jobs ({names}, shared) "  # noqa: S608 - our own column names
        f"SELECT {names}, {_SHARED} FROM d WHERE {where} ON CONFLICT DO NOTHING{returning}",
        **{column.name: _TYPES[type(column.type).__name__] for column in columns},
    )


CREATE, CREATE_RARE = _create(_NEW, " RETURNING id"), _create(_NEW_RARE, " RETURNING id")
ADD, ADD_RARE = _create(_NEW), _create(_NEW_RARE)
# The server's own clock has its say here too, as in a claim.
START_NEW = _create([*_NEW_RARE, jobs.c.node_id, jobs.c.started_at], " RETURNING id", "$due")


def _record(job: NewJob, tx: Transaction) -> dict[str, Any]:
    """A new job as a row of the jobs table."""
    to_db = tx.dialect.to_db
    run_at = to_db(job.run_at)
    row = {
        "id": job.id, "tenant_id": job.tenant_id, "topic": job.topic, "schedule_id": job.schedule_id,
        "revision": job.revision, "kind": str(job.kind),
        "scheduled_at": run_at if job.scheduled_at is job.run_at else to_db(job.scheduled_at),
        "run_at": run_at, "timezone": job.timezone, "payload": job.payload,
        "metadata": job.metadata, "owner_id": job.owner_id, "key": job.key, "target": job.target,
        "queue": job.queue, "priority": job.priority, "retry": job.retry, "timeout": job.timeout,
        "expires_at": None if job.expires_at is None else to_db(job.expires_at), "serial": job.serial,
        "state": "pending", "attempt": 0, "tries": 0,
        "created_at": run_at if job.created_at is job.run_at else to_db(job.created_at), "replaces": job.replaces,
        "route": job.route, "hold": job.hold,
    }  # fmt: skip
    if job.local_time is not None:
        row["local_time"], row["tzdata"] = job.local_time, job.tzdata
    if job.group is not None:
        row["group_name"] = job.group
    if job.conditions is not None:
        row["conditions"] = job.conditions
    return row


def _has_rare(new: Sequence[NewJob]) -> bool:
    for job in new:  # noqa: SIM110 - a generator costs more than what it asks
        if job.local_time or job.group or job.conditions:
            return True
    return False


def insert(tx: Transaction, new: Sequence[NewJob]) -> set[str]:
    """Write jobs that may collide with a live one (key, occurrence); the ids that were written."""
    written = tx.fetch(CREATE_RARE if _has_rare(new) else CREATE, [_record(job, tx) for job in new])
    return {str(row["id"]) for row in written}


TAKE_TURNS = Statement(
    "WITH $rows UPDATE timebell_jobs SET serial = true WHERE id $pick SELECT j.id FROM timebell_jobs j"
    " JOIN d ON j.schedule_id = d.id WHERE NOT j.serial AND (j.hold IS NULL OR j.hold <> 'recover') AND EXISTS"
    " (SELECT 1 FROM timebell_jobs w WHERE w.schedule_id = d.id AND w.hold = 'overlap') $picked",
    id="id",
)


def take_turns(tx: Transaction, schedules: Iterable[str | None]) -> None:
    """Where something of these schedules waits for its turn, let those before it hand it on as they end, also if they
    were made to run beside others, by another policy or a backfill."""
    tx.fetch(TAKE_TURNS, [{"id": id_} for id_ in sorted(filter(None, schedules))])


def add(tx: Transaction, new: Sequence[NewJob]) -> None:
    """As `insert`, for whoever need not know which were written."""
    tx.fetch(ADD_RARE if _has_rare(new) else ADD, [_record(job, tx) for job in new])


def start(tx: Transaction, new: Sequence[NewJob], node: str, now: datetime) -> set[str]:
    """Write due jobs as this node's first attempts at them, in one statement; the ids that were written."""
    started = {"state": "running", "attempt": 1, "node_id": node, "started_at": tx.dialect.to_db(now)}
    written = tx.fetch(START_NEW, [_record(job, tx) | started for job in new], now=tx.dialect.to_db(now))
    return {str(row["id"]) for row in written}


_FIELDS = {"group_name": "group"}
_FIXED = {"state": "pending", "attempt": 0, "tries": 0}
_INSTANTS = frozenset(column.name for column in _NEW if type(column.type).__name__ == "Instant")
_LOADED = [column for column in _NEW_RARE if column.name not in _FIXED]


def load(tx: Transaction, new: Sequence[NewJob] | Alike, *, shared: bool) -> None:
    """Write jobs that cannot collide, in bulk; `shared` says whether there are tenants beside `default`.

    Column by column, as that takes no call for each value; a column in which nobody has anything is left out.
    """
    fixed: dict[str, Any] = _FIXED | ({"shared": True} if shared else {})
    columns: dict[str, list[Any]] = {}
    for column in _LOADED:
        name = column.name
        values = _values(new, _FIELDS.get(name, name))
        if column.nullable and values.count(None) == len(values):
            continue
        if name == "kind":
            values = list(map(str, values))
        elif name in _INSTANTS:
            values = list(map(tx.dialect.to_db, values))
        if len(values) < len(new):
            (fixed[name],) = values
        else:
            columns[name] = values
    tx.load("timebell_jobs", list(columns), zip(*columns.values(), strict=True), fixed)


def _values(new: Sequence[NewJob] | Alike, field: str) -> list[Any]:
    """What jobs have in a field; one value if they all have it."""
    if not isinstance(new, Alike):
        return list(map(attrgetter(field), new))
    return new.differing.get(field) or [getattr(new.like, field)]


CLAIMABLE = "state = 'pending' AND hold IS NULL"
SHARED = f"{CLAIMABLE} AND shared"
SHARED_LANE = f"{SHARED} AND queue = l.queue AND priority = l.priority"
LATE = timedelta(seconds=0.5)
"""How late a lane may be before it is shared between its tenants."""
# In two steps, as SQLite uses only the first column of a comparison of rows.
_NEXT_LANE = ", ".join(
    f"COALESCE((SELECT {column} FROM timebell_jobs WHERE {CLAIMABLE} AND queue = l.queue"  # noqa: S608 - constants only
    f" AND priority > l.priority ORDER BY priority, run_at LIMIT 1), (SELECT {column} FROM timebell_jobs"
    f" WHERE {CLAIMABLE} AND queue > l.queue ORDER BY queue, priority, run_at LIMIT 1))"
    for column in ("queue", "priority", "run_at")
)
# What runs, here or with an outside worker: each of the two has an index.
BUSY = (
    "((SELECT count(*) FROM timebell_jobs r WHERE r.state = 'running' AND r.queue = {0})"
    " + (SELECT count(*) FROM timebell_jobs r WHERE r.state = 'dispatched' AND r.queue = {0}))"
)
# Routes are asked of what is due only: looking for one's own among millions of others' would be a walk, and waking once
# for another's costs one look. Until a vacuum comes, PostgreSQL passes all that was claimed since `since`.
_LOOK = f"""
    SELECT l.queue, l.priority, q.concurrency, q.concurrency_per_group, q.rate, q.per, q.starts,
        q.paused OR a.paused AS paused,
        (SELECT run_at FROM timebell_jobs j WHERE {CLAIMABLE} AND j.queue = l.queue
                AND j.priority = l.priority AND run_at >= l.since AND run_at <= :now AND $hears
                ORDER BY run_at LIMIT 1) AS due,
        (SELECT run_at FROM timebell_jobs j WHERE {CLAIMABLE} AND j.queue = l.queue
                AND j.priority = l.priority AND run_at > :now ORDER BY run_at LIMIT 1) AS later,
        CASE WHEN q.concurrency IS NOT NULL THEN
            {BUSY.format("l.queue")} END AS busy,
        EXISTS (SELECT 1 FROM timebell_jobs j WHERE {CLAIMABLE} AND j.queue = l.queue AND j.priority = l.priority
                AND run_at >= l.since AND run_at <= :late)
            AND (SELECT tenant_id FROM timebell_jobs WHERE {SHARED_LANE} ORDER BY tenant_id LIMIT 1)
                <> (SELECT tenant_id FROM timebell_jobs WHERE {SHARED_LANE} ORDER BY tenant_id DESC LIMIT 1) AS crowded
    FROM {{}} l LEFT JOIN timebell_queues q ON q.name = l.queue
    LEFT JOIN timebell_queues a ON a.name = '*' WHERE l.queue IS NOT NULL
    """  # noqa: S608 - constants only
# A loose index scan: a few look-ups a lane, whatever the number of pending jobs. Each lane's first is looked for once.
LANES = Statement(
    f"""
    WITH RECURSIVE lane(queue, priority, since) AS (
        SELECT * FROM (SELECT queue, priority, run_at FROM timebell_jobs WHERE {CLAIMABLE}
                       ORDER BY queue, priority, run_at LIMIT 1) AS first
        UNION ALL
        SELECT {_NEXT_LANE} FROM lane l WHERE l.queue IS NOT NULL
    ) {_LOOK.format("lane")}
    """  # noqa: S608 - constants only
)
THESE_LANES = Statement(f"WITH $rows {_LOOK.format('d')}", queue="text", priority="int", since="instant")

Since = dict[tuple[str, int], datetime]
"""Of lanes (queue, priority), an instant before which nothing in them is left that certain routes can take."""
LAPSE = timedelta(seconds=0.25)
"""How long before now that instant is at least, as who makes a job that is due now needs time to commit it."""


class Seen(NamedTuple):
    """What a look saw, and from where the next one may begin."""

    lanes: list[Lane]
    since: Since


def lanes(tx: Transaction, routes: Routes, now: datetime) -> list[Lane]:
    """Every lane with a due job that these routes can take, or with a later one; paused queues are left out.

    Most urgent priority first. `next_due` is the instant at which to look again.
    """
    return seen(tx, routes, now).lanes


def seen(tx: Transaction, routes: Routes, now: datetime, since: Since | None = None) -> Seen:
    """As `lanes`; of the lanes in `since` only, if it is given, and of what is not before these instants."""
    from_db, found = tx.dialect.from_db, Seen([], {})
    for row in look(tx, routes, now, since):
        due, later = from_db(row["due"]), from_db(row["later"])
        found.since[row["queue"], row["priority"]] = min(due or now, now - LAPSE)
        first = later if due is None else due
        if first is None or row["paused"]:
            continue
        room = None if row["concurrency"] is None else max(0, row["concurrency"] - row["busy"])
        limited = not (row["concurrency"] is row["concurrency_per_group"] is row["rate"] is None)
        free_at = None if row["rate"] is None else _free_at(row, now)
        lane = Lane(row["queue"], row["priority"], first, room, limited, free_at, bool(row["crowded"]), later)
        found.lanes.append(lane)
    if len(found.lanes) > 1:
        found.lanes.sort(key=lambda lane: (lane.priority, lane.next_due))
    return found


def look(tx: Transaction, routes: Routes, now: datetime, since: Since | None = None) -> list[Row]:
    """As `seen`: all of them, as rows."""
    to_db = tx.dialect.to_db
    params = {"now": to_db(now), "late": to_db(now - LATE), **routes.params()}
    if since is None:
        return tx.fetch(LANES, **params)
    these = [{"queue": queue, "priority": priority, "since": to_db(at)} for (queue, priority), at in since.items()]
    return tx.fetch(THESE_LANES, these, **params) if these else []


def _free_at(row: Row, now: datetime) -> datetime:
    return from_micros(next_start(decode(row["starts"]) or [], row["rate"], round(row["per"] * 1e6), to_micros(now)))


COMING = Statement(
    f"SELECT run_at, CASE WHEN $hears THEN 1 ELSE 0 END AS ours FROM timebell_jobs WHERE {CLAIMABLE}"  # noqa: S608
    " AND queue = :queue AND priority = :priority AND run_at > :now AND run_at <= :until ORDER BY run_at LIMIT :most"
)


def coming(
    tx: Transaction, lane: Lane, routes: Routes, most: int, now: datetime, until: datetime
) -> tuple[list[datetime], datetime]:
    """When the next jobs of a lane are due that these routes can take, each; and until when that is known."""
    to_db, from_db = tx.dialect.to_db, tx.dialect.from_db
    rows = tx.fetch(COMING, now=to_db(now), until=to_db(until), most=most, **of(lane, routes))
    known = from_db(rows[-1]["run_at"]) if len(rows) == most else until
    return [from_db(row["run_at"]) for row in rows if row["ours"]], known


TAKEN = (
    "id, tenant_id, topic, schedule_id, scheduled_at, kind, timezone, payload, metadata, target, queue, retry,"
    " timeout, expires_at, attempt, tries, serial, errors, revision, run_at, group_name, priority, replays,"
    " conditions"
)
START = "UPDATE timebell_jobs SET state = 'running', attempt = attempt + 1, node_id = :node, started_at = :now"
DUE = f"{CLAIMABLE} AND queue = :queue AND priority = :priority AND $due AND $hears"
_STARTED = ", ".join(f"'{name}', {'attempt + 1' if name == 'attempt' else name}" for name in TAKEN.split(", "))
# Nothing that was paused or got a limit since the look at the lanes.
_UNCHANGED = (
    " AND NOT EXISTS (SELECT 1 FROM timebell_queues q WHERE q.name IN (:queue, '*') AND (q.paused"
    " OR (q.name = :queue AND COALESCE(q.concurrency, q.concurrency_per_group, q.rate) IS NOT NULL)))"
)


def _claiming(also: str = "") -> Statement:
    first_due = f"FROM timebell_jobs WHERE {DUE} AND run_at >= :since{also} ORDER BY run_at LIMIT :most"
    return Statement(
        f"{START} WHERE $place $pick SELECT $place {first_due} $skip_locked $picked RETURNING {TAKEN}",
        InTwo(
            f"SELECT json_group_array(json_object({_STARTED})), json_group_array(id) FROM (SELECT * {first_due})",  # noqa: S608
            f"{START} WHERE id IN (SELECT value FROM json_each(:ids))",  # noqa: S608
        ),
    )


CLAIM, CLAIM_UNCHANGED = _claiming(), _claiming(_UNCHANGED)


def claim(
    tx: Transaction, lane: Lane, routes: Routes, node: str, most: int, now: datetime, *, unchanged: bool = False
) -> list[Attempt]:
    """Start up to `most` due jobs of a lane, oldest first. This statement is the instant they start.

    None that was due before the first that the look at the lanes saw: the index may have many that are gone there.
    With `unchanged`, for a lane without limits that was looked at before: none if it is paused or has limits by now.
    """
    since = tx.dialect.to_db(lane.next_due or EPOCH)
    statement = CLAIM_UNCHANGED if unchanged else CLAIM
    return begun(tx, statement, now, node=node, most=most, since=since, **of(lane, routes))


def of(lane: Lane, routes: Routes) -> dict[str, Any]:
    """The parameters that say what is claimed."""
    return {"queue": lane.queue, "priority": lane.priority, **routes.params()}


def begun(
    tx: Transaction, statement: Statement, now: datetime, rows: Sequence[dict[str, Any]] = (), **params: Any
) -> list[Attempt]:
    """Run a statement that starts jobs; their attempts, oldest first."""
    started = tx.fetch(statement, rows, now=tx.dialect.to_db(now), **params)
    if len(started) > 1:
        started.sort(key=itemgetter("run_at"))
    return [_attempt(tx, row, now) for row in started]


RUNNING = Statement(
    "SELECT id, attempt, beat, hold FROM timebell_jobs WHERE state = 'running' UNION ALL"
    " SELECT id, attempt, beat, hold FROM timebell_jobs WHERE hold = 'stopping' AND state = 'dispatched'"
)


def running(tx: Transaction) -> dict[tuple[str, int], tuple[int, bool]]:
    """Every running attempt, for whoever watches leases: its beat, and whether it was asked to stop; and those with
    outside workers that were."""
    return {(str(row["id"]), row["attempt"]): (row["beat"], row["hold"] is not None) for row in tx.fetch(RUNNING)}


_OF_J = ", ".join(f"j.{name.strip()}" for name in TAKEN.split(","))
ABANDONED = Statement(
    f"WITH $rows SELECT {_OF_J}, j.state FROM timebell_jobs j"  # noqa: S608
    " JOIN d ON j.id = d.id AND j.attempt = d.attempt WHERE j.state IN ('running', 'dispatched')",
    id="id",
    attempt="int",
)


def abandoned(tx: Transaction, attempts: Sequence[tuple[str, int]], now: datetime) -> list[Attempt]:
    """The attempts of this list that still run, whole, so that they can be decided on."""
    rows = tx.fetch(ABANDONED, [{"id": id_, "attempt": number} for id_, number in attempts])
    return [_attempt(tx, row, now, JobState(row["state"])) for row in rows]


OVERDUE = Statement(
    f"SELECT {_OF_J} FROM timebell_jobs j WHERE j.state = 'dispatched' AND j.beat <= :until"  # noqa: S608
    " ORDER BY j.beat LIMIT :most"
)


def overdue(tx: Transaction, most: int, now: datetime) -> list[Attempt]:
    """Attempts that outside workers have not reported on in time."""
    rows = tx.fetch(OVERDUE, until=to_micros(now), most=most)
    return [_attempt(tx, row, now, JobState.DISPATCHED) for row in rows]


def _attempt(tx: Transaction, row: Row, now: datetime, state: JobState = JobState.RUNNING) -> Attempt:
    # By the order of TAKEN: to ask a row for each by its name takes three times as long.
    (
        id_, tenant_id, topic, schedule_id, scheduled_at, kind, timezone, payload, metadata, target, queue, retry,
        timeout, expires_at, number, tries, serial, errors, revision, run_at, group, priority, replays, conditions, *_,
    ) = row.values()  # fmt: skip
    from_db = tx.dialect.from_db
    starts_at = from_db(run_at)
    return Attempt(
        str(id_), tenant_id, topic, None if schedule_id is None else str(schedule_id),
        starts_at if scheduled_at == run_at else from_db(scheduled_at), kind, timezone, payload, metadata, target,
        queue, retry, timeout, None if expires_at is None else from_db(expires_at), number, tries, bool(serial),
        errors, revision, starts_at, now, state, group, None, priority, replays, conditions,
    )  # fmt: skip


SKIP = Statement(
    f"WITH $rows INSERT INTO timebell_finished ({', '.join(_NEW_NAMES[:-2])}, finished_at, reason,"  # noqa: S608
    f" skipped_count, skipped_to, error) SELECT {', '.join(_NEW_NAMES[:-2])}, finished_at, reason, skipped_count,"
    " skipped_to, error FROM d",
    **{column.name: _TYPES[type(column.type).__name__] for column in _NEW[:-2]},
    finished_at="instant",
    reason="text",
    skipped_count="int",
    skipped_to="instant",
    error="text",
)


def skip(
    tx: Transaction, skips: Sequence[tuple[NewJob, str, int, datetime]], at: datetime, because: str | None = None
) -> None:
    """Record occurrences that did not fire: (as it would have been, reason, how many, the last of them); `because`
    says more of the reason."""
    rows = []
    for job, reason, count, to in skips:
        row = _record(job, tx) | {"state": JobState.SKIPPED.value, "finished_at": tx.dialect.to_db(at)}
        rows.append(
            row | {"reason": reason, "skipped_count": count, "skipped_to": tx.dialect.to_db(to), "error": because}
        )
    tx.fetch(SKIP, rows)
