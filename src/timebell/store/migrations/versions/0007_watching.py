"""What is counted at every look of whoever watches: schedules that do not fire."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_OFF = sa.text("NOT enabled OR fault IS NOT NULL")


def upgrade() -> None:
    op.create_index(
        "timebell_schedules_off", "timebell_schedules", ["enabled"], postgresql_where=_OFF, sqlite_where=_OFF
    )
