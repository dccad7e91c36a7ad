"""A delivery, and the two event loops on which targets run."""

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

from tests.coroutines import pytest_pyfunc_call as pytest_pyfunc_call
from tests.deliveries import REMINDER
from tests.unit.targets.sink import Run, Sink, local, sink
from timebell.targets import http_connections
from timebell.targets.base import Delivery, Outcome
from timebell.targets.command import CommandTarget
from timebell.targets.http import HttpTarget

T = TypeVar("T")


@pytest.fixture(params=[asyncio, uvloop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, T]], T]:
    """Run a coroutine on either event loop; it fails after two minutes instead of hanging."""

    def run(work: Coroutine[Any, Any, T]) -> T:
        result: T = request.param.run(asyncio.wait_for(work, 120))
        return result

    return run


@pytest.fixture(autouse=True)
def _short_connect_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time that a failing connection always takes, which is 5 s."""
    monkeypatch.setattr(http_connections, "CONNECT_SECONDS", 0.8)


@pytest.fixture
def delivery() -> Delivery:
    return replace(REMINDER)


@pytest.fixture
def post(run: Run, delivery: Delivery) -> Callable[..., tuple[Outcome, Sink]]:
    """Deliver once to a fresh sink."""

    def post(path: str, target: HttpTarget | None = None, **options: Any) -> tuple[Outcome, Sink]:
        async def main() -> tuple[Outcome, Sink]:
            async with sink() as server:
                checked_target = target or local()
                checked = checked_target.check({"url": f"http://hooks.example:{server.port}{path}", **options})
                outcome = await checked_target.deliver(delivery, checked)
                await checked_target.close()
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
    """Return the ids of the child processes not yet waited for, including servers of other tests."""
    return _children


@pytest.fixture
def do(run: Run, delivery: Delivery, children: Callable[[], set[str]]) -> Callable[..., Outcome]:
    """Check the options, run the command, and assert that it leaves no child process."""

    def do(*argv: str, target: CommandTarget | None = None, **options: Any) -> Outcome:
        checked_target, before = target or CommandTarget(enabled=True), children()
        outcome: Outcome = run(checked_target.deliver(delivery, checked_target.check({"argv": list(argv), **options})))
        assert children() <= before
        return outcome

    return do
