"""How many jobs of a tenant run at once, and start in a minute."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"

_OF_TENANT = sa.text("hold = 'tenant'")


def upgrade() -> None:
    op.add_column("timebell_tenants", sa.Column("starts", sa.Text()))
    op.create_index(
        "timebell_jobs_of_tenant",
        "timebell_jobs",
        ["tenant_id", "priority", "run_at"],
        postgresql_where=_OF_TENANT,
        sqlite_where=_OF_TENANT,
    )
