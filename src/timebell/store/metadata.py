"""The SQLAlchemy metadata in which all tables are registered."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from sqlalchemy import MetaData

from timebell.feature import Feature

metadata = MetaData()
CREDENTIALS = {"credentials": True}
"""`info` of tables with credentials, which only nodes may read."""


def load_tables(features: Iterable[Feature]) -> MetaData:
    """Register the tables of the core and of features; return the metadata."""
    for name in ("timebell.store.schema", *(each.tables for each in features if each.tables is not None)):
        import_module(name)
    return metadata
