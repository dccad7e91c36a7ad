"""One schedule or one-shot of another scheduler, translated but not yet verified or written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from timebell.recurrence import Spec

RUN_TIMEOUT_SECONDS = 24 * 3600.0
"""The schedulers that are imported have no time limit; this one keeps hanging runs from accumulating."""


class NotExpressible(Exception):
    """The reason why an entry cannot be imported exactly, as a sentence."""


@dataclass(frozen=True, slots=True)
class Entry:
    """`recurrence` is a spec, or the due time of a one-shot (None: now).

    `fires(start)` yields the times at which the other scheduler fires, the first one strictly after `start`.
    `clock_changes_apply` is false if its times are elapsed time from one anchor.
    """

    name: str
    source: str
    topic: str
    recurrence: Spec | datetime | None
    timezone: str
    options: dict[str, Any]
    fires: Callable[[datetime], Iterator[datetime]]
    clock_changes_apply: bool = False
    notes: list[str] = field(default_factory=list)


def to_json(value: Any, field_name: str) -> Any:
    """Return an argument as JSON, with tuples as lists. Raises NotExpressible if it would come back different."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [to_json(item, field_name) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: to_json(item, field_name) for key, item in value.items()}
    raise NotExpressible(f"{field_name} has a value of type {type(value).__name__}, which JSON does not have")


def format_cron_values(values: Set[int], low: int, high: int) -> str:
    """Return a set of values as a cron field: `*`, `*/n`, or a list of values and ranges."""
    ordered = sorted(values)
    if not ordered:
        raise NotExpressible("a field matches no value")
    if len(ordered) > 1:
        step = ordered[1] - ordered[0]
        if ordered == list(range(low, high + 1, step)):
            return "*" if step == 1 else f"*/{step}"
        if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1, step)):
            return f"{ordered[0]}-{ordered[-1]}" + (f"/{step}" if step > 1 else "")
    return ",".join(map(str, ordered))
