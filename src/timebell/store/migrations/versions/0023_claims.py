"""Claims write fewer indexes: what runs is in none of those of pages; and jobs of no schedule in no history of one.

A claim puts another version of a row under its id; half of a page is left free for these.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"

_RESTS = sa.text("state <> 'running'")
_OF_SCHEDULE = sa.text("schedule_id IS NOT NULL")


def upgrade() -> None:
    dialect = op.get_bind().dialect.name
    if dialect == "mysql":  # all indexes are over all rows there
        return
    _anew("timebell_finished_schedule", "timebell_finished", ["schedule_id", "scheduled_at"], _OF_SCHEDULE)
    _anew("timebell_jobs_tenant", "timebell_jobs", ["tenant_id", "state", "id"], _RESTS)
    _anew("timebell_jobs_topic", "timebell_jobs", ["tenant_id", "topic", "id"], _RESTS)
    if dialect == "postgresql":
        op.execute("ALTER INDEX timebell_jobs_pkey SET (fillfactor = 50)")


def _anew(name: str, table: str, columns: list[str], where: sa.TextClause) -> None:
    op.drop_index(name, table)
    op.create_index(name, table, columns, postgresql_where=where, sqlite_where=where)
