"""Which releases work on these tables: so that nodes of an older one may be started again while newer ones come.

Beside the version of the tables stands the oldest version whose release still works on them; `store/open.py` writes it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0019"


def upgrade() -> None:
    op.add_column("timebell_version", sa.Column("works_since", sa.String(32)))
