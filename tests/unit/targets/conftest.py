"""A delivery to send, and both event loops to send it on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from tests.deliveries import REMINDER
from tests.unit.targets.sink import Run, Sink, local, sink
from timebell.targets import http
from timebell.targets.base import Delivery, Outcome
from timebell.targets.command import CommandTarget
from timebell.targets.http import HttpTarget

T = TypeVar("T")


@pytest.fixture(params=[asyncio, uvloop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, T]], T]:
    """Runs a coroutine to its end, on either event loop, failing after two minutes instead of hanging."""

    def run(work: Coroutine[Any, Any, T]) -> T:
        result: T = request.param.run(asyncio.wait_for(work, 120))
        return result

    return run


@pytest.fixture(autouse=True)
def _soon_unconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that fails takes all its time, which is 5 s."""
    monkeypatch.setattr(http, "CONNECT_SECONDS", 0.8)


@pytest.fixture
def delivery() -> Delivery:
    return replace(REMINDER)


@pytest.fixture
def post(run: Run, delivery: Delivery) -> Callable[..., tuple[Outcome, Sink]]:
    """Deliver once to a fresh sink."""

    def post(path: str, target: HttpTarget | None = None, **options: Any) -> tuple[Outcome, Sink]:
        async def main() -> tuple[Outcome, Sink]:
            async with sink() as server:
                used = target or local()
                checked = used.check({"url": f"http://hooks.example:{server.port}{path}", **options})
                outcome = await used.deliver(delivery, checked)
                await used.close()
                return outcome, server

        result: tuple[Outcome, Sink] = run(main())
        return result

    return post


def _children() -> set[str]:
    found: set[str] = set()
    for one in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended meanwhile
            found.update(one.read_text().split())
    return found


@pytest.fixture
def children() -> Callable[[], set[str]]:
    """The processes that this one has started and not waited for; servers of other tests may be among them."""
    return _children


@pytest.fixture
def do(run: Run, delivery: Delivery, children: Callable[[], set[str]]) -> Callable[..., Outcome]:
    """Check the options, run the command, and find no child left behind."""

    def do(*argv: str, target: CommandTarget | None = None, **options: Any) -> Outcome:
        used, before = target or CommandTarget(enabled=True), children()
        outcome: Outcome = run(used.deliver(delivery, used.check({"argv": list(argv), **options})))
        assert children() <= before
        return outcome

    return do
