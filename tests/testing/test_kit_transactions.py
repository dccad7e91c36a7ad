"""`connection=` under the fixture: jobs exist if and only if the program's own transaction commits."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.orm import Session

from timebell import Arrived
from timebell.errors import Conflict, InvalidInput
from timebell.testing.kit import Kit


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """A database of the program, which has no tables of Timebell."""
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id INTEGER)"))
    yield engine
    engine.dispose()


def book(timebell: Kit, connection: Connection | Session, order: int, key: str | None = None) -> str:
    return timebell.app.sync.schedule_at("remind", payload={"order": order}, key=key, connection=connection).id


def test_jobs_exist_after_the_commit(timebell: Kit, engine: Engine) -> None:
    with Session(engine) as session:
        first = book(timebell, session, 1)
        book(timebell, session, 2)
        timebell.assert_not_scheduled("remind")
        session.commit()
        assert timebell.assert_scheduled("remind", {"order": 1}).id == first
        timebell.assert_scheduled("remind", {"order": 2})
        book(timebell, session, 3)
        session.rollback()
        book(timebell, session, 4)
    for order in (3, 4):
        timebell.assert_not_scheduled("remind", {"order": order})


def test_a_connection_commits_by_the_end_of_its_block(timebell: Kit, engine: Engine) -> None:
    with engine.begin() as connection:
        book(timebell, connection, 1)
    with pytest.raises(ZeroDivisionError), engine.begin() as connection:
        book(timebell, connection, 2)
        raise ZeroDivisionError
    timebell.assert_scheduled("remind", {"order": 1})
    timebell.assert_not_scheduled("remind", {"order": 2})


def test_operations_see_earlier_ones_of_their_transaction(timebell: Kit, engine: Engine) -> None:
    with engine.begin() as connection:
        job = book(timebell, connection, 1, key="one")
        with pytest.raises(Conflict):
            book(timebell, connection, 2, key="one")
        assert timebell.app.sync.cancel(job, connection=connection).outcome == "prevented"
        book(timebell, connection, 3, key="one")
    timebell.assert_not_scheduled("remind", {"order": 1})
    timebell.assert_scheduled("remind", {"order": 3}, key="one")


def test_a_savepoint_takes_its_jobs_with_it(timebell: Kit, engine: Engine) -> None:
    with Session(engine) as session:
        session.execute(text("INSERT INTO orders VALUES (1)"))
        book(timebell, session, 1)
        with pytest.raises(ZeroDivisionError), session.begin_nested():
            book(timebell, session, 2)
            raise ZeroDivisionError
        with session.begin_nested():
            book(timebell, session, 3)
        session.commit()
    timebell.assert_not_scheduled("remind", {"order": 2})
    for order in (1, 3):
        timebell.assert_scheduled("remind", {"order": order})


def test_plain_handlers_use_transactions_in_their_thread(timebell: Kit, engine: Engine) -> None:
    @timebell.app.on("pay")
    def pay(event: Arrived) -> None:
        with Session(engine) as session:
            book(timebell, session, 1)
            session.commit()
            book(timebell, session, 2)

    timebell.run(timebell.app.schedule_at("pay"))
    assert timebell.advance(seconds=1).of("pay").outcomes == ["completed"]
    timebell.assert_scheduled("remind", {"order": 1})
    timebell.assert_not_scheduled("remind", {"order": 2})


def test_code_in_other_threads_commits(timebell: Kit, engine: Engine) -> None:
    timebell.run(timebell.app.schedule_at("other"))

    def work() -> None:
        with engine.begin() as connection:
            book(timebell, connection, 1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    timebell.assert_scheduled("remind", {"order": 1})


def test_connections_to_the_database_of_the_fixture_still_work(timebell: Kit) -> None:
    with timebell.connect() as connection:
        connection.execute(text("CREATE TABLE orders (id INTEGER)"))
        book(timebell, connection, 1)
    timebell.assert_scheduled("remind", {"order": 1})


def test_connections_of_drivers_are_refused_with_a_fix(timebell: Kit) -> None:
    connection = sqlite3.connect(":memory:")
    with pytest.raises(InvalidInput, match="does not support") as refused:
        timebell.app.sync.schedule_at("remind", connection=connection)
    assert "Session of SQLAlchemy" in refused.value.fix
    connection.close()
