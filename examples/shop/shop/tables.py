"""The tables of the shop. They are in the same database as those of Timebell, so one transaction can change both."""

from __future__ import annotations

import os
from datetime import datetime

from sqlalchemy import DateTime, create_engine, make_url
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

DATABASE_URL = os.environ.get("TIMEBELL_DATABASE_URL", "sqlite:///shop.db")

_url = make_url(DATABASE_URL)
engine = create_engine(_url.set(drivername="postgresql+psycopg") if _url.get_backend_name() == "postgresql" else _url)
sessions = sessionmaker(engine)


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    state: Mapped[str] = mapped_column(default="new")
    """new, reminded or paid."""
    reminder: Mapped[str | None]
    """Id of the job that reminds the customer to pay."""
    deliver_at: Mapped[datetime | None] = mapped_column(DateTime)
    """In local time of the shop."""
