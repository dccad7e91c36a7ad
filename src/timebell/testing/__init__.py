"""The pytest plugin: the fixture `timebell`, a real engine on virtual time. See docs/guides/testing.md.

pytest imports this module wherever the package is installed, so its own imports are deferred until the fixture is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from timebell.testing.kit import Kit


@pytest.fixture
def timebell() -> Iterator[Kit]:
    """A Timebell app with its own database and clock; time advances only when the test advances it."""
    from timebell.testing.kit import Kit

    with Kit() as kit:
        yield kit


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Run async tests that use the fixture on the event loop of the fixture.

    The test becomes a plain function, so that pytest-asyncio and anyio do not run it on a loop of theirs, on which
    virtual time does not pass. pytest-asyncio has wrapped it already.
    """
    kit: Any = pyfuncitem.funcargs.get("timebell")
    test = inspect.unwrap(pyfuncitem.obj)
    if inspect.iscoroutinefunction(test) and type(kit).__module__ == f"{__name__}.kit":
        bound = test.__get__(pyfuncitem.instance) if inspect.ismethod(pyfuncitem.obj) else test

        def run_on_virtual_time(**arguments: Any) -> None:
            kit.run(bound(**arguments))

        pyfuncitem.obj = run_on_virtual_time
    return (yield)
