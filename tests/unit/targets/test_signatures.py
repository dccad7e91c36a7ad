"""The payload type of a handler, from its signature."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

import pytest

from timebell import Arrived
from timebell.errors import InvalidInput
from timebell.targets.payloads import PayloadType
from timebell.targets.signatures import payload_type_of

T = TypeVar("T")


def typed(event: Arrived[int]) -> None: ...


def with_option(size: int, event: Arrived[int]) -> None: ...


@wraps(typed)
def wrapped(*args: Any) -> None: ...


def evaluated(kind: Any) -> Callable[..., None]:
    """Return a handler whose annotation is a type instead of its text."""

    def handle(event: Any) -> None: ...

    handle.__annotations__["event"] = kind
    return handle


class Callee:
    def __call__(self, event: Arrived[int]) -> None: ...


def untyped(event: Arrived) -> None: ...  # type: ignore[type-arg]


def anything(event: Arrived[Any]) -> None: ...


def generic(event: Arrived[T]) -> None: ...


def other(event: list[int]) -> None: ...


def unannotated(event) -> None: ...  # type: ignore[no-untyped-def]


def nothing() -> None: ...


def version_of(result: PayloadType | None) -> tuple[Any, int] | None:
    return None if result is None else (result.kind, result.version)


@pytest.mark.parametrize(
    "handler",
    [typed, wrapped, Callee(), evaluated(Arrived[int]), partial(typed), partial(with_option, 3)],
    ids=["function", "wrapped", "object", "evaluated", "partial", "partial with an argument"],
)
def test_the_type_of_the_first_parameter_is_the_payload_type(handler: Callable[..., Any]) -> None:
    assert version_of(payload_type_of(handler, 1, None)) == (int, 1)


@pytest.mark.parametrize(
    "handler",
    [untyped, anything, generic, other, unannotated, nothing, evaluated(Arrived), evaluated(Arrived[Any]),
     evaluated(list[int]), min],
)  # fmt: skip
def test_other_handlers_take_any_payload(handler: Callable[..., Any]) -> None:
    assert payload_type_of(handler, 1, None) is None
    assert version_of(payload_type_of(handler, 2, None)) == (None, 2)


def test_a_type_that_cannot_be_resolved_is_refused() -> None:
    class Local: ...

    def handle(event: Arrived[Local]) -> None: ...

    with pytest.raises(InvalidInput, match=r"takes Arrived\[Local\], but .*: name 'Local' is not defined") as refused:
        payload_type_of(handle, 1, None)
    assert refused.value.code == "UNKNOWN_PAYLOAD_TYPE"


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", None])
def test_a_version_is_a_whole_number_from_1(version: Any) -> None:
    with pytest.raises(InvalidInput, match="whole number from 1") as refused:
        payload_type_of(typed, version, None)
    assert refused.value.code == "INVALID_VERSION"


@pytest.mark.parametrize(
    ("version", "steps", "valid"),
    [
        (2, [1], True), (3, [1, 2], True), (3, [2], True), (3, [], True), (12, [9, 10, 11], True),
        (3, [1], False), (2, [2], False), (1, [1], False), (2, [0, 1], False), (1, [0], False), (2, ["1"], False),
    ],
)  # fmt: skip
def test_upgrades_lead_to_the_version_without_a_gap(version: int, steps: list[Any], valid: bool) -> None:
    upgrade = dict.fromkeys(steps, lambda payload: payload + 1)
    if valid:
        result = payload_type_of(typed, version, upgrade)
        assert result is not None
        assert result.parse("t", 0, version - len(steps)) == len(steps)
        return
    with pytest.raises(InvalidInput) as refused:
        payload_type_of(typed, version, upgrade)
    assert refused.value.code == "INVALID_VERSION"
