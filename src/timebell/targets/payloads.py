"""Typed payloads: what a handler says of them, checked when a job is made and again when it is due.

Types are read by pydantic, which is imported only for handlers that name one.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import orjson

from timebell.errors import InvalidInput, InvalidPayload

VERSION = "payload_version"
"""The metadata that says which version a payload is of; 1 where it is missing."""
SHOWN = 5  # problems of one payload that a message names

_AS_THEY_ARE = frozenset({dict, list, str, int, float, bool, type(None)})

Upgrade = Callable[[Any], Any]


class PayloadType:
    """What a payload is read as: `kind` (None: JSON as it is), of a version that older ones are brought up to."""

    def __init__(self, kind: Any, version: int, upgrade: Mapping[int, Upgrade]) -> None:
        self.kind = kind
        self.version = version
        self._upgrade = upgrade
        self._adapter = None if kind is None else _adapter(kind)

    def read(self, topic: str, payload: Any, version: int) -> Any:
        """A stored payload of a version up to this one, typed. Raises InvalidPayload (PAYLOAD_INVALID)."""
        for older in range(version, self.version):
            step = self._upgrade.get(older)
            if step is None:
                raise _unfit(f"payload for {topic} is of version {older}, and nothing brings it to {older + 1}.")
            try:
                payload = step(payload)
            except Exception as failed:
                problem = f"{type(failed).__name__}: {failed}"
                raise _unfit(
                    f"payload for {topic} cannot be brought from version {older} to {older + 1}: {problem}."
                ) from failed
        if self._adapter is None:
            return payload
        from pydantic import ValidationError

        try:
            return self._adapter.validate_json(orjson.dumps(payload))
        except ValidationError as unfit:
            problems = "; ".join(map(_problem, unfit.errors(include_url=False)[:SHOWN]))
            raise _unfit(f"payload for {topic} does not fit {_name(self.kind)}: {problems}.") from unfit


def payload_type(
    function: Callable[..., Any], version: int, upgrade: Mapping[int, Upgrade] | None
) -> PayloadType | None:
    """What a handler takes: the T of its `Arrived[T]`, if it names one, and how old payloads are brought up to it.

    Raises InvalidInput (PAYLOAD_TYPE_UNKNOWN, PYDANTIC_MISSING, INVALID_VERSION).
    """
    steps = dict(upgrade or {})
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise InvalidInput(f"version is {version!r}; it is a whole number from 1.", code="INVALID_VERSION")
    if sorted(steps, key=repr) != sorted(range(version - len(steps), version), key=repr) or len(steps) >= version:
        raise InvalidInput(
            f"upgrade has steps from {', '.join(map(repr, steps))}, and the payload is of version {version}.",
            code="INVALID_VERSION", fix=f"Give a function for each step to version {version}: {{1: from_1_to_2, ...}}.",
        )  # fmt: skip
    kind = _annotated(function)
    return PayloadType(kind, version, steps) if kind is not None or version > 1 else None


def version_of(metadata: Mapping[str, Any]) -> int:
    """The version of a job's payload. Raises InvalidPayload (INVALID_VERSION)."""
    version = metadata.get(VERSION, 1)
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise InvalidPayload(
            f"metadata {VERSION} is {version!r:.60}; it is a whole number from 1.", code="INVALID_VERSION"
        )
    return version


def plain(payload: Any) -> Any:
    """A payload as JSON's own values: models and dataclasses as pydantic writes them. Others as they are."""
    kind: Any = type(payload)
    if kind in _AS_THEY_ARE:
        return payload
    try:
        if callable(getattr(kind, "model_dump", None)):
            return payload.model_dump(mode="json", by_alias=True)
        if dataclasses.is_dataclass(type(payload)):
            return _of_dataclass(kind).dump_python(payload, mode="json", by_alias=True)
    except InvalidInput:  # no pydantic: the fields, if they are JSON themselves
        return dataclasses.asdict(payload)
    except ValueError as failed:
        raise InvalidPayload(f"payload is a {_name(kind)} that cannot be written as JSON: {failed}.") from failed
    return payload


def _adapter(kind: Any) -> Any:
    try:
        import pydantic
    except ImportError:
        raise InvalidInput(
            f"Payloads are read as {_name(kind)} by pydantic, which is not installed.", code="PYDANTIC_MISSING",
            fix='Run: pip install pydantic. Or annotate the event as plain "Arrived".',
        ) from None  # fmt: skip
    try:
        return pydantic.TypeAdapter(kind)
    except (pydantic.PydanticUserError, pydantic.PydanticUndefinedAnnotation) as unknown:
        raise _unknown(_name(kind), str(unknown).partition("\n")[0]) from unknown


_of_dataclass = lru_cache(maxsize=1000)(_adapter)


def _annotated(function: Callable[..., Any]) -> Any:
    """The T of a first parameter that is an `Arrived[T]`; None for any other."""
    from timebell.targets.handler import Arrived

    try:
        first = next(iter(inspect.signature(function).parameters.values()), None)
    except (TypeError, ValueError, NameError):  # a builtin; or an annotation that only type checkers see
        return None
    hint = None if first is None else first.annotation
    if isinstance(hint, str):
        if "[" not in hint:
            return None
        home = inspect.unwrap(getattr(function, "func", function))
        names = getattr(home, "__globals__", None) or getattr(type(home).__call__, "__globals__", {})
        written = SimpleNamespace(__annotations__={"event": hint})
        try:
            hint = typing.get_type_hints(written, names, {"Arrived": Arrived})["event"]
        except Exception as unknown:
            raise _unknown(hint, str(unknown)) from unknown
    if typing.get_origin(hint) is not Arrived:
        return None
    (kind,) = typing.get_args(hint)
    return None if kind is Any or isinstance(kind, typing.TypeVar) else kind


def _unknown(kind: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"A handler takes {kind}, but its payload's type cannot be read: {why}.", code="PAYLOAD_TYPE_UNKNOWN",
        fix="Use a pydantic model, a dataclass or a TypedDict that is defined or imported in the handler's module.",
    )  # fmt: skip


def _unfit(message: str) -> InvalidPayload:
    return InvalidPayload(message, code="PAYLOAD_INVALID", fix="Correct the payload.")


def _problem(error: Mapping[str, Any]) -> str:
    """One of pydantic's problems: which field, what it should be, what it is."""
    where = ".".join(map(str, error["loc"])) or "all of it"
    got = "" if error["type"] == "missing" else f", got {error['input']!r:.60}"
    return f"{where}: {error['msg']}{got}"


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)
