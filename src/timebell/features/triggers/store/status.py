"""Status of triggers for display."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import select, text

from timebell.features.triggers.store.tables import firings
from timebell.store.audit.overview import MAX_LISTED, AttentionItem
from timebell.store.cluster.gauges import bounded_count, schedule_label
from timebell.store.cluster.problems import MAX_PROBLEMS, ObjectProblem, page_path
from timebell.store.schema import sources
from timebell.store.transaction import Transaction


def count_planned_jobs(tx: Transaction, trigger_ids: Collection[str]) -> dict[str, int]:
    """Return the number of planned jobs by trigger id, counted up to COUNT_LIMIT + 1."""
    is_planned = firings.c.job_id.is_not(None)
    return {
        id_: tx.execute(select(bounded_count(firings, firings.c.trigger_id == id_, is_planned))).scalar_one()
        for id_ in trigger_ids
    }


def list_failing_sources(tx: Transaction, tenant_id: str) -> list[AttentionItem]:
    """Return trigger sources that cannot be read or to which access was lost."""
    s = sources.c
    is_failing = s.error.is_not(None) | s.orphaned_at.is_not(None)
    query = select(s.id, s.name, s.error, s.orphaned_at, s.orphaned_reason).where(s.tenant_id == tenant_id, is_failing)
    return [
        AttentionItem(row.id, row.name, at=row.orphaned_at, why=row.orphaned_reason or row.error)
        for row in tx.execute(query.order_by(s.name).limit(MAX_LISTED)).all()
    ]


_UNREADABLE_SOURCES = (
    select(sources.c.tenant_id, sources.c.name, sources.c.error, sources.c.orphaned_reason)
    .where(text("(orphaned_at IS NOT NULL OR error IS NOT NULL)"))  # literally as in the index
    .order_by(sources.c.name)
    .limit(MAX_PROBLEMS)
)


def list_problems(tx: Transaction) -> list[ObjectProblem]:
    """Return the sources of all tenants that cannot be read, for alerts."""
    return [
        ObjectProblem(
            "SOURCE_FAILING", label := schedule_label(row.tenant_id, row.name),
            f"The source {label} cannot be read, and its triggers do not fire: {row.orphaned_reason or row.error}",
            page_path(row.tenant_id, "/ui/triggers"),
        )
        for row in tx.execute(_UNREADABLE_SOURCES)
    ]  # fmt: skip
