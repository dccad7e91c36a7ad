"""Claims write fewer indexes: what runs is in none of those of pages.

A claim puts another version of a row under its id; half of a page is left free for these.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"

_RESTS = sa.text("state <> 'running'")


def upgrade() -> None:
    dialect = op.get_bind().dialect.name
    if dialect == "mysql":  # all indexes are over all rows there
        return
    _anew("timebell_jobs_tenant", ["tenant_id", "state", "id"])
    _anew("timebell_jobs_topic", ["tenant_id", "topic", "id"])
    if dialect == "postgresql":
        op.execute("ALTER INDEX timebell_jobs_pkey SET (fillfactor = 50)")


def _anew(name: str, columns: list[str]) -> None:
    op.drop_index(name, "timebell_jobs")
    op.create_index(name, "timebell_jobs", columns, postgresql_where=_RESTS, sqlite_where=_RESTS)
