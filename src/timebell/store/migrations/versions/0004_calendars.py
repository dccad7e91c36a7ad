"""Calendars by name and version, and which schedules follow one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from timebell.store.types import Instant

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "timebell_calendars",
        sa.Column("tenant_id", sa.String(200), primary_key=True),
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("version", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("definition", sa.Text(), nullable=False),
        sa.Column("created_at", Instant, nullable=False),
    )
    op.add_column("timebell_schedules", sa.Column("calendar", sa.String(200)))
    op.create_index(
        "timebell_schedules_calendar",
        "timebell_schedules",
        ["calendar"],
        postgresql_where=sa.text("calendar IS NOT NULL"),
        sqlite_where=sa.text("calendar IS NOT NULL"),
    )
