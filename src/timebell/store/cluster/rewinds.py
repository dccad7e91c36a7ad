"""Losses of acknowledged writes: a failover to a standby that lagged behind, or a restore, rewound the history."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import islice
from typing import Any

from sqlalchemy import Column, insert, select

from timebell.formatting import format_count
from timebell.model.job import Hold
from timebell.store.jobs import repository
from timebell.store.recent_writes import CANCELS, CREATIONS, JOBS, KINDS, PAUSES, RESULTS, SCHEDULES, Batch, Written
from timebell.store.schedules.actions import pause_schedule
from timebell.store.schedules.schedules import JobBuilder
from timebell.store.schema import finished, jobs, revisions, rewinds, schedules
from timebell.store.transaction import Transaction

IDS_PER_QUERY = 1000
MAX_EXAMPLES = 20


@dataclass(frozen=True, slots=True)
class Rewind:
    """One loss, as noticed by one process: numbers of rows by kind, and when their commits were acknowledged."""

    id: str
    node: str
    detected_at: datetime
    lost_from: datetime
    lost_until: datetime
    counts: dict[str, int]
    examples: dict[str, list[str]] = field(default_factory=dict)
    reapplied: dict[str, int] = field(default_factory=dict)
    """Numbers of the lost writes that were repeated: jobs, cancels, pauses."""

    @property
    def total(self) -> int:
        """The number of lost rows of all kinds."""
        return sum(self.counts.values())

    def describe(self) -> str:
        """Return the loss as a sentence."""
        parts = ", ".join(format_count(self.counts[kind], LOSS_NOUNS[kind]) for kind in KINDS if self.counts[kind])
        sentence = (
            f"The database lost {parts}, acknowledged from {self.lost_from:%Y-%m-%d %H:%M:%S} to"
            f" {self.lost_until:%H:%M:%S} UTC; noticed by {self.node}."
        )
        repeated = ", ".join(
            format_count(count, noun) + (" (held as a backlog)" if name == "held" else "")
            for name, noun in REAPPLIED_NOUNS.items()
            if (count := self.reapplied.get(name))
        )
        return f"{sentence} Repeated: {repeated}." if repeated else sentence


LOSS_NOUNS = {JOBS: "created job", RESULTS: "job result", CANCELS: "cancel", SCHEDULES: "schedule change"}
REAPPLIED_NOUNS = {"held": "job", "jobs": "job", "cancels": "cancel", "pauses": "pause"}


def find_lost(tx: Transaction, batches: Sequence[Batch]) -> dict[str, set[str]]:
    """Return the ids, by kind, of written rows that the database does not have."""
    written = {kind: _last_written(batches, kind) for kind in KINDS}
    # Live jobs are read first: one that ends between the two statements is found by both, instead of by none.
    ids = {*written[JOBS], *written[RESULTS], *written[CANCELS]}
    live = _find_existing(tx, [jobs.c.id], ids)
    ended = _find_existing(tx, [finished.c.id], ids)
    created = written[JOBS].keys()
    return {
        JOBS: created - ended - live,
        # If the creation is lost, too, only that is counted.
        RESULTS: written[RESULTS].keys() - ended - (created - live),
        CANCELS: written[CANCELS].keys() - ended - (created - live),
        SCHEDULES: _find_lost_schedules(tx, written[SCHEDULES]),
    }


def _last_written(batches: Iterable[Batch], kind: str) -> dict[str, Any]:
    written: dict[str, Any] = {}
    for batch in batches:
        if batch.kind == kind:
            written |= batch.rows
    return written


def reapply(
    tx: Transaction, batches: Sequence[Batch], lost: dict[str, set[str]], reapplied_jobs: str, build: JobBuilder,
    now: datetime,
) -> dict[str, int]:  # fmt: skip
    """Repeat lost cancels, pauses and creations; return the number of each.

    Created jobs keep their ids and occurrence keys; `reapplied_jobs` is the setting `lost_jobs`. A job whose result or
    cancel this process has written is not created again: it has run, or must not run.
    """
    pauses = {id_: made for id_, made in _last_written(batches, PAUSES).items() if made and id_ in lost[SCHEDULES]}
    # Paused as of the original instant, so that what was due since then does not fire.
    paused = sum(
        pause_schedule(tx, tenant_id, id_, reason, build, paused_at) is not None
        for id_, (tenant_id, reason, paused_at) in pauses.items()
    )
    cancelled = sum(repository.cancel(tx, None, id_, now) is not None for id_ in sorted(lost[CANCELS]))
    ended = {*_last_written(batches, RESULTS), *_last_written(batches, CANCELS)}
    creations = _last_written(batches, CREATIONS)
    hold = Hold.BACKLOG if reapplied_jobs == "hold" else None
    recreated = [replace(creations[id_], hold=hold) for id_ in sorted(lost[JOBS] & creations.keys() - ended)]
    counts = {"held" if hold else "jobs": 0, "cancels": cancelled, "pauses": paused}
    if recreated and reapplied_jobs != "report":
        existing = repository.create(tx, recreated, "keep")
        counts["held" if hold else "jobs"] = len(recreated) - len(existing)
    return counts


def _find_existing(tx: Transaction, columns: list[Column[str]], ids: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for chunk in _chunks(ids):
        found |= {str(row[0]) for row in tx.execute(select(*columns).where(columns[0].in_(chunk)))}
    return found


def _find_lost_schedules(tx: Transaction, written: Written) -> set[str]:
    stored: dict[str, datetime] = {}
    for chunk in _chunks(written):
        rows = tx.execute(select(schedules.c.id, schedules.c.updated_at).where(schedules.c.id.in_(chunk)))
        stored |= {str(row.id): row.updated_at for row in rows}
    # A schedule that was deleted meanwhile, by another process or in a commit of unknown outcome, leaves its revisions.
    deleted = _find_existing(tx, [revisions.c.schedule_id], written.keys() - stored)

    def is_lost(id_: str, updated_at: datetime | None) -> bool:
        if updated_at is None:
            return id_ in stored
        return stored[id_] < updated_at if id_ in stored else id_ not in deleted

    return {id_ for id_, updated_at in written.items() if is_lost(id_, updated_at)}


def _chunks(ids: Iterable[str]) -> Iterable[list[str]]:
    remaining = iter(ids)
    while chunk := list(islice(remaining, IDS_PER_QUERY)):
        yield chunk


def record_rewind(tx: Transaction, rewind: Rewind) -> None:
    """Store a loss."""
    row = asdict(rewind)
    examples, counts, reapplied = row.pop("examples"), row.pop("counts"), row.pop("reapplied")
    texts = {"examples": json.dumps(examples), "reapplied": json.dumps(reapplied)}
    tx.execute(insert(rewinds).values(**row, **counts, **texts))


def list_rewinds(tx: Transaction, since: datetime, until: datetime | None = None) -> list[Rewind]:
    """Return the losses of writes acknowledged since an instant (and before `until`), latest first."""
    is_affected = rewinds.c.lost_until >= since
    if until is not None:
        is_affected &= rewinds.c.lost_from < until
    return [
        Rewind(
            str(row.id), row.node, row.detected_at, row.lost_from, row.lost_until,
            {kind: getattr(row, kind) for kind in KINDS}, json.loads(row.examples),
            json.loads(row.reapplied),
        )
        for row in tx.execute(select(rewinds).where(is_affected).order_by(rewinds.c.detected_at.desc()))
    ]  # fmt: skip
