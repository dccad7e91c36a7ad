"""Alembic's autogenerate of a host application leaves Timebell's tables alone."""

from __future__ import annotations

from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Column, Integer, MetaData, Table, create_engine

from timebell import Timebell
from timebell.integrations.alembic import include_name


def test_autogenerate_proposes_only_changes_of_the_host(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    Timebell(url).sync.upgrade()
    metadata = MetaData()
    Table("orders", metadata, Column("id", Integer, primary_key=True))
    engine = create_engine(url)
    with engine.connect() as connection:
        unfiltered = compare_metadata(MigrationContext.configure(connection), metadata)
        context = MigrationContext.configure(connection, opts={"include_name": include_name})
        filtered = compare_metadata(context, metadata)
    engine.dispose()
    assert [(change[0], change[1].name) for change in filtered] == [("add_table", "orders")]
    assert len(unfiltered) > 30
