"""Payload types of handlers, from their signatures."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from timebell.errors import InvalidInput
from timebell.targets.arrived import Arrived
from timebell.targets.payloads import PayloadType, Upgrade, unknown_type


def payload_type_of(
    function: Callable[..., Any], version: int, upgrade: Mapping[int, Upgrade] | None
) -> PayloadType | None:
    """Return the payload type of a handler: the T of its `Arrived[T]`, with its version and upgrades.

    None if it has neither a type nor a version above 1. Raises InvalidInput (UNKNOWN_PAYLOAD_TYPE, PYDANTIC_MISSING,
    INVALID_VERSION).
    """
    steps = dict(upgrade or {})
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise InvalidInput(f"version is {version!r}; it must be a whole number from 1.", code="INVALID_VERSION")
    if sorted(steps, key=repr) != sorted(range(version - len(steps), version), key=repr) or len(steps) >= version:
        raise InvalidInput(
            f"upgrade has steps from {', '.join(map(repr, steps))}, but the payload has version {version}.",
            code="INVALID_VERSION", fix=f"Give a function for each step to version {version}: {{1: from_1_to_2, ...}}.",
        )  # fmt: skip
    kind = _annotated_type(function)
    return PayloadType(kind, version, steps) if kind is not None or version > 1 else None


def _annotated_type(function: Callable[..., Any]) -> Any:
    """Return the T of a first parameter annotated as `Arrived[T]`, otherwise None."""
    try:
        first = next(iter(inspect.signature(function).parameters.values()), None)
    except (TypeError, ValueError, NameError):  # a builtin, or an annotation under TYPE_CHECKING
        return None
    hint = None if first is None else first.annotation
    if isinstance(hint, str):
        if "[" not in hint:
            return None
        definition = inspect.unwrap(getattr(function, "func", function))
        namespace = getattr(definition, "__globals__", None) or getattr(type(definition).__call__, "__globals__", {})
        annotated = SimpleNamespace(__annotations__={"event": hint})
        try:
            hint = typing.get_type_hints(annotated, namespace, {"Arrived": Arrived})["event"]
        except Exception as error:
            raise unknown_type(hint, str(error)) from error
    if typing.get_origin(hint) is not Arrived:
        return None
    (kind,) = typing.get_args(hint)
    return None if kind is Any or isinstance(kind, typing.TypeVar) else kind
