"""Operations in transactions of the program under test: `connection=` in a simulation.

The program's database is not the simulated one. So an operation is rehearsed on the simulated database, to get its
result, and carried out there when the program commits. If the program rolls back, also to a savepoint, it never is.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, event, text

from timebell.errors import InvalidInput
from timebell.store.dialects import caller_connections
from timebell.store.dialects.base import caller_thread

if TYPE_CHECKING:
    from timebell.store.transaction import Transaction

_SAVEPOINT = re.compile(r"\s*SAVEPOINT\s+(\S+)", re.IGNORECASE)
_ROLLBACK_TO = re.compile(r"\s*ROLLBACK\s+TO\s+(?:SAVEPOINT\s+)?(\S+)", re.IGNORECASE)
Step = Callable[["Transaction"], Any]
Execute = Callable[[Step], Any]


class CallerTransactions:
    """The open transactions of the program. `execute` runs a step in one transaction of the simulated database."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute
        self._sqlalchemy: WeakKeyDictionary[Connection, _SqlAlchemyTransaction] = WeakKeyDictionary()
        self._django: dict[str, _DjangoTransaction] = {}

    async def join(self, connection: Any, operation: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operation in the transaction of a connection of SQLAlchemy or Django; return its result.

        Raises InvalidInput (INVALID_CONNECTION, TRANSACTION_MISSING).
        """
        step = lambda tx: operation(tx, *args, **kwargs)  # noqa: E731
        if hasattr(connection, "run_sync"):
            return await connection.run_sync(lambda inner: self._join(inner, step))
        run_in_caller_thread: Callable[[Callable[[], Any]], Awaitable[Any]] | None = caller_thread.get()
        join = partial(self._join, connection, step)
        if run_in_caller_thread is not None:
            return await run_in_caller_thread(join)
        with outside_of_event_loop():
            return join()

    def _join(self, connection: Any, step: Step) -> Any:
        if caller_connections.is_django(connection):
            driver = caller_connections.django_driver_connection(connection)
            caller_connections.check_transaction(str(caller_connections.driver_of(driver)), driver)
            return self._django.setdefault(connection.alias, _DjangoTransaction(self._execute)).join(connection, step)
        if not isinstance(connection, Connection):
            connection = connection.connection()  # of a session
        if connection not in self._sqlalchemy:
            self._sqlalchemy[connection] = _SqlAlchemyTransaction(self._execute, connection)
        connection.execute(text("SELECT 1"))  # begins the transaction, or fails if it is broken
        return self._sqlalchemy[connection].join(step)

    def settle(self) -> None:
        """Carry out the operations of Django's transactions that only the enclosing TestCase keeps open."""
        for transaction in self._django.values():
            transaction.settle()


def is_supported(connection: Any) -> bool:
    """Return whether this is a connection or session of SQLAlchemy, or Django's connection.

    Raises InvalidInput (INVALID_CONNECTION) for one of a driver: the end of its transactions cannot be observed.
    """
    if caller_connections.driver_of(connection) is not None:
        raise InvalidInput(
            f"connection is a {type(connection).__module__} connection, which the test fixture does not support.",
            code="INVALID_CONNECTION",
            fix="In tests, pass a Connection or Session of SQLAlchemy, sync or async, or Django's connection.",
        )
    return any((caller_connections.is_django(connection), hasattr(connection, "run_sync"),
                isinstance(connection, Connection), callable(getattr(connection, "connection", None))))  # fmt: skip


@contextmanager
def outside_of_event_loop() -> Iterator[None]:
    """Hide the running event loop from blocking code of the program: Django refuses to work in one.

    In a simulation `app.sync` runs the loop in the thread of its caller.
    """
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)


class _Rehearsed(Exception):
    """Ends a rehearsal, so that it is rolled back."""


def _rehearse(execute: Execute, steps: list[Step]) -> Any:
    """Return the result of the last step after all others, without any effect."""
    results: list[Any] = []

    def run(tx: Transaction) -> None:
        results.extend(step(tx) for step in steps)
        raise _Rehearsed

    try:
        execute(run)
    except _Rehearsed:
        return results[-1]


def _run_all(steps: list[Step], tx: Transaction) -> None:
    for step in steps:
        step(tx)


class _SqlAlchemyTransaction:
    """The operations in the transactions of one connection, one after another."""

    def __init__(self, execute: Execute, connection: Connection) -> None:
        self._execute = execute
        self._steps: list[Step] = []
        self._savepoints: dict[str, int] = {}
        event.listen(connection, "commit", self._commit)
        event.listen(connection, "rollback", self._discard)
        event.listen(connection, "before_cursor_execute", self._observe_savepoints)  # SQLAlchemy's own and textual ones

    def join(self, step: Step) -> Any:
        """Add an operation; return its result."""
        result = _rehearse(self._execute, [*self._steps, step])
        self._steps.append(step)
        return result

    def _commit(self, _: Connection) -> None:
        steps, self._steps = self._steps, []
        if steps:
            self._execute(partial(_run_all, steps))

    def _discard(self, _: Connection) -> None:
        self._steps = []

    def _observe_savepoints(self, _: Connection, __: Any, statement: str, *___: Any) -> None:
        if begun := _SAVEPOINT.match(statement):
            self._savepoints[begun[1]] = len(self._steps)
        elif rolled_back := _ROLLBACK_TO.match(statement):
            del self._steps[self._savepoints.get(rolled_back[1], 0) :]


class _DjangoStep:
    """An operation that Django calls at the commit."""

    def __init__(self, execute: Execute, step: Step) -> None:
        self._execute = execute
        self.step = step
        self.is_done = False

    def __call__(self) -> None:
        if not self.is_done:
            self.is_done = True
            self._execute(self.step)


class _DjangoTransaction:
    """The operations in the transactions of one of Django's connections."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute
        self._connection: Any = None

    def join(self, connection: Any, step: Step) -> Any:
        """Add an operation; return its result."""
        self._connection = connection
        result = _rehearse(self._execute, [*(each.step for each in self._pending()), step])
        connection.on_commit(_DjangoStep(self._execute, step))
        return result

    def settle(self) -> None:
        """Carry out the operations if no other transaction than that of a TestCase is open; it never commits."""
        blocks = getattr(self._connection, "atomic_blocks", ())
        if blocks and all(getattr(block, "_from_testcase", False) for block in blocks):
            for each in self._pending():
                each()

    def _pending(self) -> list[_DjangoStep]:
        """Return the operations that were not rolled back; Django discards those of a savepoint."""
        entries = (entry[1] for entry in self._connection.run_on_commit)
        return [entry for entry in entries if isinstance(entry, _DjangoStep) and not entry.is_done]


def share_testcase_connections() -> AbstractContextManager[None]:
    """Return a context for another thread that uses the connections of Django's TestCase.

    Only in their transaction, which is never committed, are the rows of the test visible.
    """
    if "django.db" not in sys.modules or not sys.modules["django.conf"].settings.configured:
        return nullcontext()
    connections = sys.modules["django.db"].connections
    with outside_of_event_loop():  # where Django keeps other connections
        shared = [
            connection
            for connection in connections.all(initialized_only=True)
            if any(getattr(block, "_from_testcase", False) for block in connection.atomic_blocks)
        ]
    return _in_this_thread(connections, shared)


@contextmanager
def _in_this_thread(connections: Any, shared: list[Any]) -> Iterator[None]:
    for connection in shared:
        connection.inc_thread_sharing()
        connections[connection.alias] = connection
    try:
        yield
    finally:
        for connection in shared:
            del connections[connection.alias]
            connection.dec_thread_sharing()
