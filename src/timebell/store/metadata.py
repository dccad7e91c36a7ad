"""The SQLAlchemy metadata in which all tables are registered."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from sqlalchemy import MetaData, Table

from timebell.feature import Feature

metadata = MetaData()
CREDENTIALS = {"credentials": True}
"""`info` of tables with credentials, which only nodes may read."""


def load_tables(features: Iterable[Feature]) -> MetaData:
    """Register the tables of the core and of features; return the metadata."""
    import_module("timebell.store.schema")
    tables_of(features)
    return metadata


def tables_of(features: Iterable[Feature]) -> list[Table]:
    """Return the tables of features, in the order in which they are defined."""
    modules = [import_module(feature.tables) for feature in features if feature.tables is not None]
    return [value for module in modules for value in vars(module).values() if isinstance(value, Table)]
