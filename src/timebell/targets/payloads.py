"""Typed payloads: the payload type of a handler, validated when a job is created and again when it is due.

Validation uses pydantic, which is imported only for handlers with a payload type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import orjson

from timebell.errors import InvalidInput, InvalidPayload

VERSION_KEY = "payload_version"
"""Metadata key of the payload version; a missing key means 1."""
MAX_PROBLEMS_SHOWN = 5  # problems listed in one error message

_JSON_TYPES = frozenset({dict, list, str, int, float, bool, type(None)})

Upgrade = Callable[[Any], Any]


class PayloadType:
    """A payload type (`kind`; None: plain JSON), its version, and the upgrades from older versions."""

    def __init__(self, kind: Any, version: int, upgrade: Mapping[int, Upgrade]) -> None:
        self.kind = kind
        self.version = version
        self._upgrade = upgrade
        self._adapter = None if kind is None else _type_adapter(kind)

    def parse(self, topic: str, payload: Any, version: int) -> Any:
        """Upgrade a stored payload of `version` and validate it. Raises InvalidPayload (INVALID_PAYLOAD)."""
        for older in range(version, self.version):
            step = self._upgrade.get(older)
            if step is None:
                raise _invalid_payload(
                    f"payload for {topic} has version {older}, and there is no upgrade to {older + 1}."
                )
            try:
                payload = step(payload)
            except Exception as exc:
                problem = f"{type(exc).__name__}: {exc}"
                raise _invalid_payload(
                    f"payload for {topic} cannot be upgraded from version {older} to {older + 1}: {problem}."
                ) from exc
        if self._adapter is None:
            return payload
        from pydantic import ValidationError

        try:
            return self._adapter.validate_json(orjson.dumps(payload))
        except ValidationError as error:
            problems = "; ".join(map(_describe_problem, error.errors(include_url=False)[:MAX_PROBLEMS_SHOWN]))
            raise _invalid_payload(f"payload for {topic} does not fit {_type_name(self.kind)}: {problems}.") from error


def payload_version(metadata: Mapping[str, Any]) -> int:
    """Return the version of a job's payload. Raises InvalidPayload (INVALID_VERSION)."""
    version = metadata.get(VERSION_KEY, 1)
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise InvalidPayload(
            f"metadata {VERSION_KEY} is {version!r:.60}; it must be a whole number from 1.", code="INVALID_VERSION"
        )
    return version


def to_json_value(payload: Any) -> Any:
    """Convert a pydantic model or dataclass to JSON values; return other payloads unchanged."""
    kind: Any = type(payload)
    if kind in _JSON_TYPES:
        return payload
    try:
        if callable(getattr(kind, "model_dump", None)):
            return payload.model_dump(mode="json", by_alias=True)
        if dataclasses.is_dataclass(type(payload)):
            return _dataclass_adapter(kind).dump_python(payload, mode="json", by_alias=True)
    except InvalidInput:  # without pydantic, only JSON fields work
        return dataclasses.asdict(payload)
    except ValueError as error:
        raise InvalidPayload(f"payload is a {_type_name(kind)} that cannot be converted to JSON: {error}.") from error
    return payload


def _type_adapter(kind: Any) -> Any:
    try:
        import pydantic
    except ImportError:
        raise InvalidInput(
            f"Payloads of type {_type_name(kind)} require pydantic, which is not installed.", code="PYDANTIC_MISSING",
            fix='Run: pip install pydantic. Or annotate the event as plain "Arrived".',
        ) from None  # fmt: skip
    try:
        return pydantic.TypeAdapter(kind)
    except (pydantic.PydanticUserError, pydantic.PydanticUndefinedAnnotation) as error:
        raise unknown_type(_type_name(kind), str(error).partition("\n")[0]) from error


_dataclass_adapter = lru_cache(maxsize=1000)(_type_adapter)


def unknown_type(kind: str, reason: str) -> InvalidInput:
    """Create the error for a payload type that cannot be resolved."""
    return InvalidInput(
        f"A handler takes {kind}, but its payload type cannot be resolved: {reason}.", code="UNKNOWN_PAYLOAD_TYPE",
        fix="Use a pydantic model, a dataclass or a TypedDict that is defined or imported in the handler's module.",
    )  # fmt: skip


def _invalid_payload(message: str) -> InvalidPayload:
    return InvalidPayload(message, code="INVALID_PAYLOAD", fix="Correct the payload.")


def _describe_problem(error: Mapping[str, Any]) -> str:
    """Format a pydantic error: the field, the problem, the actual value."""
    field = ".".join(map(str, error["loc"])) or "the payload"
    actual = "" if error["type"] == "missing" else f", got {error['input']!r:.60}"
    return f"{field}: {error['msg']}{actual}"


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)
