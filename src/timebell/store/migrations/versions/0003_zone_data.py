"""Which release of the zone data gave an instant, and what it takes to compute it again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from timebell.store.types import Instant

revision = "0003"
down_revision = "0002"

_WAITING = sa.text("local_time IS NOT NULL AND state = 'pending'")


def upgrade() -> None:
    op.add_column("timebell_schedules", sa.Column("tzdata", sa.String(20)))
    op.add_column("timebell_schedules", sa.Column("utc_offset", sa.Integer()))
    for table in ("timebell_jobs", "timebell_finished"):
        op.add_column(table, sa.Column("local_time", sa.String(32)))
        op.add_column(table, sa.Column("tzdata", sa.String(20)))
    op.create_index(
        "timebell_jobs_local", "timebell_jobs", ["tzdata"], postgresql_where=_WAITING, sqlite_where=_WAITING
    )
    op.create_table(
        "timebell_zone_changes",
        sa.Column("tzdata", sa.String(20), primary_key=True),
        sa.Column("timezone", sa.String(64), primary_key=True),
        sa.Column("offset_before", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("offset_after", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("looked_at", sa.Integer(), nullable=False),
        sa.Column("schedules", sa.Integer(), nullable=False),
        sa.Column("jobs", sa.Integer(), nullable=False),
        sa.Column("since", Instant),
        sa.Column("recorded_at", Instant, nullable=False),
    )
