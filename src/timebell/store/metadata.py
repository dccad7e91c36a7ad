"""The SQLAlchemy metadata in which all tables are registered."""

from sqlalchemy import MetaData

metadata = MetaData()
