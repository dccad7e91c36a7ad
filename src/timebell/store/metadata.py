"""What all tables are registered with."""

from sqlalchemy import MetaData

metadata = MetaData()
