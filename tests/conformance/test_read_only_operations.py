"""Operations that only read need no transaction: on PostgreSQL, a page of a list is a single statement."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from asyncpg.prepared_stmt import PreparedStatement
from asyncpg.transaction import Transaction

from timebell import Timebell
from timebell.store.jobs import dead_letters, next_due, queues, repository, search, waiting
from timebell.store.schedules import queries
from timebell.store.transaction import READ_ONLY_OPERATIONS


def test_marked_operations_neither_write_nor_lock() -> None:
    modules = (dead_letters, next_due, queues, repository, search, waiting, queries)
    assert {module.__name__ for module in modules} <= {each.__module__ for each in READ_ONLY_OPERATIONS}
    for operation in READ_ONLY_OPERATIONS:
        source = inspect.getsource(operation)
        for word in ("insert(", "update(", "delete(", "with_for_update", "notify(", "lock"):
            assert word not in source, (operation.__name__, word)


def test_a_list_is_one_statement(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    statements: list[str] = []
    fetch, start = PreparedStatement.fetch, Transaction.start

    async def logged_fetch(statement: PreparedStatement[Any], *args: Any, **kwargs: Any) -> Any:
        statements.append(statement.get_query().split()[0])
        return await fetch(statement, *args, **kwargs)

    async def logged_start(transaction: Transaction) -> None:
        statements.append("BEGIN")
        await start(transaction)

    monkeypatch.setattr(PreparedStatement, "fetch", logged_fetch)
    monkeypatch.setattr(Transaction, "start", logged_start)

    async def main() -> None:
        app = Timebell(postgres_url, timezone="UTC")
        await app.schedule_at("a")
        operation: Any
        for operation, count in ((queries.list_schedules, 1), (repository.list_jobs, 2)):  # live and finished jobs
            arguments: Any = ("default", 10, None) if count == 1 else ({}, (), 10, None)
            filters: Any = {"sort": "name"} if count == 1 else {}
            await app.store.run(operation, *arguments, **filters)
            statements.clear()
            await app.store.run(operation, *arguments, **filters)
            assert statements == ["SELECT"] * count
        await app.close()

    asyncio.run(main())
