"""The pytest plugin: the fixture `timebell`, a real engine on virtual time. See docs/guides/testing.md.

pytest imports this module wherever the package is installed, so its own imports are deferred until the fixture is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
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


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run async tests that use the fixture on the event loop of the fixture."""
    kit: Any = pyfuncitem.funcargs.get("timebell")
    if not inspect.iscoroutinefunction(pyfuncitem.obj) or type(kit).__module__ != f"{__name__}.kit":
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    kit.run(pyfuncitem.obj(**arguments))
    return True
