"""Policies as data. What they mean is decided in `decide.py`; nothing here acts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Self, TypeVar

from timebell.errors import InvalidInput

W = TypeVar("W", bound=StrEnum)


class Overlap(StrEnum):
    """What an occurrence does when an earlier job of its schedule is still live."""

    SKIP = "skip"
    QUEUE = "queue"
    CANCEL_PREVIOUS = "cancel_previous"
    ALLOW = "allow"


class CatchUp(StrEnum):
    """What becomes of occurrences that were missed (more than `missed_after` late)."""

    LATEST = "latest"
    ALL = "all"
    SKIP = "skip"


class Lateness(StrEnum):
    """What an occurrence is worth when it is missed."""

    STATE = "state"
    ANCHORED = "anchored"


class Unheard(StrEnum):
    """What becomes of a due job whose topic no live node listens to."""

    HOLD = "hold"
    COMPLETE = "complete"


class Backoff(StrEnum):
    """How the pause grows from one try to the next."""

    FIXED = "fixed"
    LINEAR = "linear"
    EXPONENTIAL = "exponential"


def choice(words: type[W], value: Any, field: str) -> W:
    """`value` as one of the words. Raises InvalidInput."""
    if value not in list(words):
        raise InvalidInput(
            f"{field} is {value!r:.60}.", code=f"INVALID_{field.upper()}", fix=f"Use {', '.join(words)}."
        )
    return words(value)


def seconds(value: float | timedelta, field: str, *, least: float = 0.0) -> float:
    """`value` as seconds. Raises InvalidInput when it is not a number of at least `least`."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e10:
        raise InvalidInput(
            f"{field} is {value!r}, which is not a duration of at least {least:g} seconds.",
            code="INVALID_DURATION",
            fix="Give seconds as a number, or a timedelta.",
        )
    return float(value)


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how soon a failed attempt is tried again.

    `attempts` counts all tries, the first included (4 by default); errors, timeouts and lost leases use
    them up, snoozes and drains do not. `delay` and `max_delay` are seconds (or timedeltas); each pause is
    lengthened by up to `jitter` of itself.
    """

    attempts: int = 4
    backoff: Backoff | str = Backoff.EXPONENTIAL
    delay: float | timedelta = 5.0
    max_delay: float | timedelta = 600.0
    jitter: float = 0.1

    def __post_init__(self) -> None:
        whole = isinstance(self.attempts, int) and not isinstance(self.attempts, bool)
        if not whole or not 1 <= self.attempts <= 1000:
            raise InvalidInput(
                f"retry attempts is {self.attempts!r}; it goes from 1 (one try, no retry) to 1000.",
                code="INVALID_RETRY",
            )
        if self.backoff not in list(Backoff):
            raise InvalidInput(
                f"retry backoff is {self.backoff!r}.",
                code="INVALID_RETRY",
                fix="Use fixed, linear or exponential.",
            )
        if not isinstance(self.jitter, int | float) or not 0 <= self.jitter <= 1:
            raise InvalidInput(f"retry jitter is {self.jitter!r}; it goes from 0 to 1.", code="INVALID_RETRY")
        object.__setattr__(self, "backoff", Backoff(self.backoff))
        object.__setattr__(self, "delay", seconds(self.delay, "retry delay"))
        object.__setattr__(self, "max_delay", seconds(self.max_delay, "retry max_delay"))

    @classmethod
    def read(cls, value: Self | Mapping[str, Any] | None) -> Self | None:
        """A Retry as it is, or one from `{"attempts": 3, "backoff": "exponential", "delay": 5}`."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping) or set(value) - set(cls.__slots__):
            raise InvalidInput(
                f"retry is {value!r}.",
                code="INVALID_RETRY",
                fix=f"Give a Retry, or a mapping with {', '.join(cls.__slots__)}.",
            )
        return cls(**value)

    def to_json(self) -> dict[str, Any]:
        """Its fields, durations in seconds."""
        return {name: getattr(self, name) for name in self.__slots__} | {"backoff": str(self.backoff)}

    def pause(self, tries: int, fraction: float) -> float:
        """Seconds to wait after the `tries`-th failed try; `fraction` in [0, 1) places it in the jitter."""
        delay, longest = float(self.delay), float(self.max_delay)  # type: ignore[arg-type]
        match self.backoff:
            case Backoff.FIXED:
                base = delay
            case Backoff.LINEAR:
                base = delay * tries
            case _:
                base = delay * 2.0 ** min(tries - 1, 60)
        return min(base, longest) * (1 + self.jitter * fraction)
