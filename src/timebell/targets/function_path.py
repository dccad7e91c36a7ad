"""Functions that worker processes can run: how they are found by name, and what is refused."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import reduce
from importlib import import_module
from typing import Any, NamedTuple

from timebell.errors import InvalidInput


class FunctionPath(NamedTuple):
    """The place of a function: the attribute of a module, or what that wraps after `depth` decorators."""

    module: str
    name: str
    depth: int

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionPath:
        """Return the path of a function. Raises InvalidInput (INVALID_EXECUTOR) if it is not found there."""
        module, name, depth = function.__module__, function.__qualname__, 0
        found: Any
        try:
            found = reduce(getattr, name.split("."), sys.modules[module])
            while found is not function:
                found, depth = found.__wrapped__, depth + 1
        except (KeyError, AttributeError):
            raise _invalid_executor(
                f"A worker process cannot find {name} in the module {module}.",
                "Define it there once, with a name of its own, in a module that can be imported.",
            ) from None
        return cls(module, name, depth)

    def resolve(self) -> Callable[..., Any]:
        """Import the module and return the function."""
        found: Any = reduce(getattr, self.name.split("."), import_module(self.module))
        for _ in range(self.depth):
            found = found.__wrapped__
        return found  # type: ignore[no-any-return]


def check_executor(executor: object, function: Callable[..., Any]) -> None:
    """Raise InvalidInput (INVALID_EXECUTOR) unless the executor exists and can run the function.

    Whether its module really contains it is known later, when the module is complete.
    """
    if executor != "process":
        raise _invalid_executor(f"There is no executor {executor!r:.60}.", 'Use executor="process", or leave it out.')
    name = getattr(function, "__qualname__", repr(function))
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        raise _invalid_executor(
            f"{name:.100} is not a plain function, so no worker process can run it.",
            "Write def handle(event: Arrived), without async, at the top level of a module.",
        )
    if "<" in name:
        raise _invalid_executor(
            f"{name:.100} is a lambda or defined inside a function, so no worker process can import it.",
            "Write a function at the top level of a module.",
        )
    if function.__module__ == "__main__":
        raise _invalid_executor(
            f"{name:.100} is defined in the main program, which worker processes do not import.",
            "Move it to a module and import that, or start the program with: timebell run module:app.",
        )


def _invalid_executor(message: str, fix: str) -> InvalidInput:
    return InvalidInput(message, code="INVALID_EXECUTOR", fix=fix)
