"""Requests that need the same key or limits share one read; malformed keys need none."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.coroutines import pytest_pyfunc_call as pytest_pyfunc_call
from timebell.api.authentication import CACHE_SECONDS
from timebell.api.shared_reads import SharedReads

from .web import Web, is_problem

Make = Callable[..., Any]
MALFORMED = ("", "tb_live_0123456789ab_" + "0" * 56, "x" * 100)


async def test_concurrent_reads_of_a_key_are_one_read_and_share_its_error() -> None:
    reads, go, count = SharedReads[int](), asyncio.Event(), Counter[str]()

    async def read(key: str) -> int:
        count[key] += 1
        await go.wait()
        if key == "b":
            raise LookupError
        return count.total()

    waiting = [asyncio.create_task(reads.get(key, lambda key=key: read(key))) for key in "aaabb"]  # type: ignore[misc]
    await asyncio.sleep(0)
    waiting[0].cancel()  # the others still get the result
    go.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError, int, int, LookupError, LookupError]
    assert count == {"a": 1, "b": 1}
    assert await reads.get("a", lambda: read("a")) == 3  # not a cache


async def test_many_first_requests_read_key_and_limits_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make(open_here=False) as web:
        key = await web.key()
        operations = _count_operations(web, monkeypatch)
        first = web.app.clock.monotonic()
        for now in (first, first + CACHE_SECONDS + 1):
            monkeypatch.setattr(web.app.clock, "monotonic", lambda now=now: now)
            answers = await asyncio.gather(*(web.get("/nodes", key=key) for _ in range(30)))
            assert {answer.status_code for answer in answers} == {200}
            assert operations["find_key"] == operations["count_requests_and_get_limits"] == 1
            operations.clear()


@pytest.mark.parametrize("text", MALFORMED)
async def test_a_malformed_key_is_refused_without_the_database(
    make: Make, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    async with make(open_here=False) as web:
        await web.key()
        operations = _count_operations(web, monkeypatch)
        is_problem(await web.get("/nodes", key=text), 401, "UNAUTHORIZED")
        assert not operations["find_key"]


def _count_operations(web: Web, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    operations, run = Counter[str](), web.app.store.run

    async def counted(operation: Any, *args: Any, **kwargs: Any) -> Any:
        operations[operation.__name__] += 1
        return await run(operation, *args, **kwargs)

    monkeypatch.setattr(web.app.store, "run", counted)
    return operations
