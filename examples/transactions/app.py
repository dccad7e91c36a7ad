"""Create jobs in the application's own transaction, on connections of SQLAlchemy, psycopg and asyncpg.

The job exists if and only if the transaction, which also inserts a row, commits.

    pip install timebell "psycopg[binary]"
    export TIMEBELL_DATABASE_URL=postgresql://timebell@localhost/reminders
    timebell db upgrade
    python app.py

For Django, see `examples/django_app`.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

import asyncpg
import psycopg
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from timebell import Timebell

URL = os.environ["TIMEBELL_DATABASE_URL"]
bell = Timebell(URL, timezone="UTC")


class Oops(Exception):
    """Another step of the transaction failed."""


def with_sqlalchemy(order: str, *, fail: bool) -> None:
    engine = create_engine(URL.replace("postgresql://", "postgresql+psycopg://"))
    with Session(engine) as session, session.begin():
        session.execute(text("INSERT INTO orders VALUES (:order)"), {"order": order})
        bell.sync.schedule_at("orders.remind", payload={"order": order}, key=order, connection=session)
        if fail:
            raise Oops
    engine.dispose()


def with_psycopg(order: str, *, fail: bool) -> None:
    with psycopg.connect(URL) as connection:
        connection.execute("INSERT INTO orders VALUES (%s)", [order])
        bell.sync.schedule_at("orders.remind", payload={"order": order}, key=order, connection=connection)
        if fail:
            raise Oops


async def with_asyncpg(order: str, *, fail: bool) -> None:
    connection = await asyncpg.connect(URL)
    try:
        async with connection.transaction():
            await connection.execute("INSERT INTO orders VALUES ($1)", order)
            await bell.schedule_at("orders.remind", payload={"order": order}, key=order, connection=connection)
            if fail:
                raise Oops
    finally:
        await connection.close()
        await bell.close()


def create_orders(order: str, *, fail: bool) -> None:
    """Create one order with each of the three libraries; its name contains the library."""
    with suppress(Oops):
        with_sqlalchemy(f"{order}-sqlalchemy", fail=fail)
    with suppress(Oops):
        with_psycopg(f"{order}-psycopg", fail=fail)
    with suppress(Oops):
        asyncio.run(with_asyncpg(f"{order}-asyncpg", fail=fail))


if __name__ == "__main__":
    with psycopg.connect(URL) as setup:
        setup.execute("CREATE TABLE orders (name text PRIMARY KEY)")
    create_orders("kept", fail=False)
    create_orders("gone", fail=True)
    with psycopg.connect(URL) as connection:
        print("orders:", *sorted(name for (name,) in connection.execute("SELECT name FROM orders")))
    print("jobs:", *sorted(job.key for job in bell.sync.list(topic="orders.remind").items))
