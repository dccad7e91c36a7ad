"""Transactions of several operations: what ends one half-way leaves nothing of it, and the next one nothing to find."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from timebell.app import Timebell
from timebell.errors import StoreError


def test_what_raises_leaves_nothing_and_the_next_one_commits(store_url: str) -> None:
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


def test_one_that_is_cancelled_leaves_nothing(store_url: str) -> None:
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


def test_a_file_that_is_closed_meanwhile_gets_no_half_of_one(sqlite_url: str) -> None:
    async def ask() -> list[Any]:
        app = Timebell(sqlite_url, timezone="UTC")
        await app.open()
        with pytest.raises(StoreError):
            async with app.store.begin() as connection:
                await app.schedule_at("before", connection=connection)
                await app.store.close()
                await app.store.open()
                await app.schedule_at("after", connection=connection)
        with pytest.raises(StoreError):  # it is over
            await app.schedule_at("later", connection=connection)
        found = [job.topic for job in await app.list()]
        await app.close()
        return found

    assert asyncio.run(ask()) == []
