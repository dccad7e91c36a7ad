"""Policies as data; `decide.py` implements them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Literal, Self, TypeVar

from timebell.durations import Duration, parse_duration
from timebell.errors import InvalidInput

E = TypeVar("E", bound=StrEnum)


class Overlap(StrEnum):
    """The treatment of an occurrence while an earlier job of its schedule is still live."""

    SKIP = "skip"
    QUEUE = "queue"
    CANCEL_PREVIOUS = "cancel_previous"
    ALLOW = "allow"


class CatchUp(StrEnum):
    """The treatment of missed occurrences (more than `missed_after` late)."""

    LATEST = "latest"
    ALL = "all"
    SKIP = "skip"


class WhenLate(StrEnum):
    """The treatment of a missed occurrence: it runs late, subject to catch-up, or expires."""

    RUN = "run"
    EXPIRE = "expire"


class OnUnhandled(StrEnum):
    """The treatment of a due job whose topic no live node handles."""

    HOLD = "hold"
    COMPLETE = "complete"


class Backoff(StrEnum):
    """The growth of the pause between attempts."""

    FIXED = "fixed"
    LINEAR = "linear"
    EXPONENTIAL = "exponential"


def parse_choice(choices: type[E], value: Any, field: str) -> E:
    """Return `value` as a member of `choices`. Raises InvalidInput (INVALID_<FIELD>)."""
    if value not in list(choices):
        raise InvalidInput(
            f"{field} is {value!r:.60}.", code=f"INVALID_{field.upper()}", fix=f"Use {', '.join(choices)}."
        )
    return choices(value)


def parse_seconds(value: Duration, field: str, *, minimum: float = 0.0) -> float:
    """Return a duration in seconds. Raises InvalidInput (INVALID_DURATION) below `minimum` or from 1e10 seconds."""
    seconds = parse_duration(value) if isinstance(value, timedelta | str) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not minimum <= seconds < 1e10:
        raise InvalidInput(
            f"{field} is {value!r:.60}, which is not a duration of at least {minimum:g} seconds.",
            code="INVALID_DURATION",
            fix='Use a timedelta, a number of seconds, or text such as "15m" or "PT15M".',
        )
    return float(seconds)


@dataclass(frozen=True, slots=True)
class Retry:
    """The retry policy of failed attempts.

    `attempts` is the allowed total, including the first one. Errors, timeouts and lost leases use up attempts; snoozes
    and drains do not. `delay` and `max_delay` are durations (numbers are seconds). Each pause is lengthened by a random
    fraction of up to `jitter`. Raises InvalidInput (INVALID_RETRY, INVALID_DURATION).
    """

    attempts: int = 4
    backoff: Backoff | Literal["fixed", "linear", "exponential"] = Backoff.EXPONENTIAL
    delay: Duration = 5.0
    max_delay: Duration = 600.0
    jitter: float = 0.1
    retry_on: tuple[type[BaseException], ...] = ()
    """Only these exceptions of the handler are retried; empty: all. For `@app.on` only."""
    fail_on: tuple[type[BaseException], ...] = ()
    """These exceptions of the handler are not retried. For `@app.on` only."""

    def __post_init__(self) -> None:
        for name in ("retry_on", "fail_on"):
            kinds = getattr(self, name)
            kinds = tuple(kinds) if isinstance(kinds, tuple | list) else (kinds,)
            if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
                raise InvalidInput(
                    f"retry {name} is {kinds!r:.60}.", code="INVALID_RETRY", fix=f"Use {name}=(TimeoutError, OSError)."
                )
            object.__setattr__(self, name, kinds)
        is_integer = isinstance(self.attempts, int) and not isinstance(self.attempts, bool)
        if not is_integer or not 1 <= self.attempts <= 1000:
            raise InvalidInput(
                f"retry attempts is {self.attempts!r}; it must be from 1 (no retry) to 1000.",
                code="INVALID_RETRY",
            )
        if self.backoff not in list(Backoff):
            raise InvalidInput(
                f"retry backoff is {self.backoff!r}.",
                code="INVALID_RETRY",
                fix="Use fixed, linear or exponential.",
            )
        if not isinstance(self.jitter, int | float) or not 0 <= self.jitter <= 1:
            raise InvalidInput(f"retry jitter is {self.jitter!r}; it must be from 0 to 1.", code="INVALID_RETRY")
        object.__setattr__(self, "backoff", Backoff(self.backoff))
        object.__setattr__(self, "delay", parse_seconds(self.delay, "retry delay"))
        object.__setattr__(self, "max_delay", parse_seconds(self.max_delay, "retry max_delay"))

    @classmethod
    def parse(cls, value: Self | Mapping[str, Any] | None) -> Self | None:
        """Return a Retry unchanged, or build one from `{"attempts": 3, "backoff": "exponential", "delay": 5}`."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping) or set(value) - set(cls.__slots__):
            raise InvalidInput(
                f"retry is {value!r}.",
                code="INVALID_RETRY",
                fix=f"Use a Retry, or a mapping with {', '.join(cls.__slots__)}.",
            )
        return cls(**value)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON, durations in seconds. Raises InvalidInput for exceptions, which are code."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        exceptions = (*fields.pop("retry_on"), *fields.pop("fail_on"))
        if exceptions:
            raise InvalidInput(
                "retry_on and fail_on cannot be stored with a job or schedule.", code="INVALID_RETRY",
                fix="Specify them for the handler: @app.on(topic, retry=Retry(retry_on=...)).",
            )  # fmt: skip
        return fields | {"backoff": str(self.backoff)}

    def is_retryable(self, error: BaseException) -> bool:
        """Return whether an exception of the handler permits another attempt."""
        return not isinstance(error, self.fail_on) and (not self.retry_on or isinstance(error, self.retry_on))

    def pause_seconds(self, attempts_used: int, jitter_fraction: float) -> float:
        """Return the seconds to wait after the `attempts_used`-th failed attempt.

        `jitter_fraction` in [0, 1) selects a point within the jitter.
        """
        delay, max_delay = float(self.delay), float(self.max_delay)  # type: ignore[arg-type]
        match self.backoff:
            case Backoff.FIXED:
                base = delay
            case Backoff.LINEAR:
                base = delay * attempts_used
            case _:
                base = delay * 2.0 ** min(attempts_used - 1, 60)
        return min(base, max_delay) * (1 + self.jitter * jitter_fraction)
