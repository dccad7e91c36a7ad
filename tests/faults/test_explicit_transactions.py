"""Explicit transactions of several operations: an interruption rolls back, and the next transaction is unaffected."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from timebell.app import Timebell
from timebell.errors import StoreError


def test_an_exception_rolls_back_and_the_next_transaction_commits(store_url: str) -> None:
    async def ask() -> list[Any]:
        app = Timebell(store_url, timezone="UTC")
        await app.open()
        with pytest.raises(ZeroDivisionError):
            async with app.store.begin() as connection:
                await app.schedule_at("lost", connection=connection)
                raise ZeroDivisionError
        async with app.store.begin() as connection:
            await app.schedule_at("kept", connection=connection)
        async with app.store.begin():
            pass
        found = [job.topic for job in await app.list()]
        await app.close()
        return found

    assert asyncio.run(ask()) == ["kept"]


def test_a_cancelled_transaction_is_rolled_back(store_url: str) -> None:
    async def ask() -> list[Any]:
        app = Timebell(store_url, timezone="UTC")
        await app.open()
        written = asyncio.Event()

        async def request() -> None:
            async with app.store.begin() as connection:
                await app.schedule_at("lost", connection=connection)
                written.set()
                await asyncio.Event().wait()

        going = asyncio.create_task(request())
        await written.wait()
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await going
        async with app.store.begin() as connection:
            await app.schedule_at("kept", connection=connection)
        found = [job.topic for job in await app.list()]
        await app.close()
        return found

    assert asyncio.run(ask()) == ["kept"]


def test_closing_the_store_during_a_transaction_rolls_it_back(sqlite_url: str) -> None:
    async def ask() -> list[Any]:
        app = Timebell(sqlite_url, timezone="UTC")
        await app.open()
        with pytest.raises(StoreError):
            async with app.store.begin() as connection:
                await app.schedule_at("before", connection=connection)
                await app.store.close()
                await app.store.open()
                await app.schedule_at("after", connection=connection)
        with pytest.raises(StoreError):  # the transaction has ended
            await app.schedule_at("later", connection=connection)
        found = [job.topic for job in await app.list()]
        await app.close()
        return found

    assert asyncio.run(ask()) == []
