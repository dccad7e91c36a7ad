"""Rate limits of queues, concurrency by group, and lanes that tenants share."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_SHARED = sa.text("state = 'pending' AND hold IS NULL AND shared")
_IN_GROUP = sa.text("hold = 'group'")


def upgrade() -> None:
    op.add_column("timebell_queues", sa.Column("concurrency_per_group", sa.Integer()))
    op.add_column("timebell_queues", sa.Column("rate", sa.Integer()))
    op.add_column("timebell_queues", sa.Column("per", sa.Float()))
    op.add_column("timebell_queues", sa.Column("starts", sa.Text()))
    for table in ("timebell_jobs", "timebell_finished"):
        op.add_column(table, sa.Column("group_name", sa.String(200)))
    op.add_column("timebell_jobs", sa.Column("shared", sa.Boolean(), nullable=False, server_default=sa.false()))
    # What waits by now is shared if there are tenants; it is written anew only then.
    op.execute(
        "UPDATE timebell_jobs SET shared = true WHERE state = 'pending'"
        " AND EXISTS (SELECT 1 FROM timebell_tenants WHERE id <> 'default')"
    )
    op.create_index(
        "timebell_jobs_shared",
        "timebell_jobs",
        ["queue", "priority", "tenant_id", "run_at"],
        postgresql_where=_SHARED,
        sqlite_where=_SHARED,
    )
    op.create_index(
        "timebell_jobs_group",
        "timebell_jobs",
        ["queue", "tenant_id", "group_name", "priority", "run_at"],
        postgresql_where=_IN_GROUP,
        sqlite_where=_IN_GROUP,
    )
