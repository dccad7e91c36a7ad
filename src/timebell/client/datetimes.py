"""Strict parsing of `run_at`: an aware datetime, a local one with a time zone, or ISO 8601 text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from timebell.errors import InThePast, InvalidInput, InvalidInstant
from timebell.recurrence import Zone, resolve_local, zone, zone_key
from timebell.recurrence.describe import describe_date

PAST_GRACE = timedelta(seconds=5)
LAST_YEAR = 2199
TIMEZONE_FIX = 'Specify timezone="Asia/Seoul", or a default with TIMEBELL_DEFAULT_TIMEZONE or Timebell(timezone=...).'


@dataclass(slots=True)
class ResolvedTime:
    """An instant (aware UTC), its time zone, and the `adjustment` of its local time: `gap`, `fold` or None.

    `local_time` is set if the instant was specified as a local time.
    """

    at: datetime
    timezone: str
    adjustment: str | None = None
    local_time: str | None = None

    def fields(self) -> dict[str, Any]:
        """Return the time fields of a NewJob; jobs defined by a local time include the tzdata release."""
        tzdata = None if self.local_time is None else zone(self.timezone).release.version
        return {
            "run_at": self.at, "timezone": self.timezone, "adjusted": self.adjustment, "local_time": self.local_time,
            "tzdata": tzdata,
        }  # fmt: skip


def resolve_run_at(
    value: datetime | str | None,
    timezone: str | ZoneInfo | None,
    default: str | None,
    now: datetime,
    on_gap: str = "shift",
    on_fold: str = "first",
) -> ResolvedTime:
    """Resolve `run_at`. None means now; a naive datetime is local time in the zone.

    The zone is `timezone`, or the key of the datetime's ZoneInfo, or `default`. A local time that the clock skips
    or repeats is resolved as in RFC 5545, 3.3.5, or rejected with "error"; `fold=1` selects the second of a repeated
    time (PEP 495).

    Raises InvalidInput (INVALID_ON_GAP, INVALID_ON_FOLD), InvalidInstant (INVALID_RUN_AT, RUN_AT_IN_GAP,
    RUN_AT_AMBIGUOUS, RUN_AT_WITHOUT_TIMEZONE, TIMEZONE_MISSING), InThePast (SCHEDULE_IN_THE_PAST), and
    INVALID_TIMEZONE for an unknown zone.
    """
    if on_gap not in ("shift", "error"):
        raise InvalidInput(f"on_gap is {on_gap!r:.60}.", code="INVALID_ON_GAP", fix="Use shift or error.")
    if on_fold not in ("first", "error"):
        raise InvalidInput(
            f"on_fold is {on_fold!r:.60}.", code="INVALID_ON_FOLD",
            fix="Use first or error; fold=1 in the datetime selects the second.",
        )  # fmt: skip
    if isinstance(value, str):
        value = _parse(value)
    if value is not None and not isinstance(value, datetime):
        raise InvalidInstant(
            f"run_at is {value!r}, which is not a datetime.",
            fix="Use a datetime with a time zone, or ISO 8601 text.",
        )
    specified = timezone if timezone is not None else _own_zone(value) or default
    if specified is None:
        raise _missing_zone_error(value)
    tz = zone(zone_key(specified))
    if value is None:
        return ResolvedTime(now, tz.name)
    adjustment = local_time = None
    if value.tzinfo is None:
        local_time = value.isoformat()
        at, adjustment = resolve_local(value, tz)
        if adjustment == "fold" and value.fold:
            at, adjustment = value.replace(tzinfo=tz.info).astimezone(UTC), None
        if (adjustment == "gap" and on_gap == "error") or (adjustment == "fold" and on_fold == "error"):
            raise _adjusted_time_error(value, tz, adjustment)
    else:
        at = _to_utc(value)
    if at < now - PAST_GRACE:
        raise InThePast(
            f"Cannot schedule in the past: run_at is {at.isoformat()}, now is {now.isoformat(timespec='seconds')}.",
            fix="Specify a later time, or omit run_at to run now.",
        )
    if at.year > LAST_YEAR:
        raise InvalidInstant(f"run_at is in the year {at.year}; the last one is {LAST_YEAR}.")
    return ResolvedTime(at, tz.name, adjustment, local_time)


def resolve_uniform(values: Sequence[Any], now: datetime) -> list[datetime] | None:
    """Resolve times that are all None, or all aware with the same tzinfo, in one pass.

    Returns None if they must be resolved one by one with `resolve_run_at`, also to report an error.
    """
    kinds = set(map(type, values))
    if kinds == {type(None)}:
        return [now] * len(values)
    if kinds != {datetime}:
        return None
    tzinfo = values[0].tzinfo
    if tzinfo is None or not all(value.tzinfo is tzinfo for value in values):
        return None
    try:
        instants = [value.astimezone(UTC) for value in values]
    except OverflowError:
        return None
    return instants if min(instants) >= now - PAST_GRACE and max(instants).year <= LAST_YEAR else None


def _adjusted_time_error(local_time: datetime, tz: Zone, adjustment: str) -> InvalidInstant:
    """Return the error for a local time that the clock skips or repeats, with both interpretations."""
    both = [tz.local(local_time.replace(tzinfo=tz.info, fold=fold).astimezone(UTC)) for fold in (0, 1)]
    where = f"on {describe_date(local_time)} in {tz.name}"
    if adjustment == "gap":
        options = [
            f"{_format_time(option, None if option.date() == local_time.date() else option)} ({option.tzname()})"
            for option in both
        ]
        return InvalidInstant(
            f"{_format_time(local_time)} does not exist {where}.",
            code="RUN_AT_IN_GAP",
            fix=f"Write {options[0]} or {options[1]}.",
        )
    options = [f"{option.isoformat()} ({option.tzname()})" for option in both]
    return InvalidInstant(
        f"{_format_time(local_time)} happens twice {where}.", code="RUN_AT_AMBIGUOUS",
        fix=f"Write {options[0]} or {options[1]}; fold=1 in a datetime selects the second.",
    )  # fmt: skip


def _format_time(local_time: datetime, day: datetime | None = None) -> str:
    """Return the time of day in its shortest form, followed by the date of `day`, if specified."""
    clock = local_time.time().isoformat("auto" if local_time.second or local_time.microsecond else "minutes")
    return clock if day is None else f"{clock} on {describe_date(day)}"


def _parse(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInstant(
            f"run_at {text[:60]!r} is not a date and time: {error}.",
            fix="Write it as 2027-03-14T09:30:00Z, or as local time and specify a timezone.",
        ) from error


def _to_utc(value: datetime) -> datetime:
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise InvalidInstant(f"run_at is in the year {value.year}; the last one is {LAST_YEAR}.") from None


def is_utc(value: Any) -> bool:
    """Return whether a `run_at` is an instant in UTC, and so does not name the zone of a place."""
    if isinstance(value, str):
        value = _parse(value)
    return isinstance(value, datetime) and _own_zone(value) == "UTC"


def _own_zone(value: datetime | None) -> str | None:
    if value is None or value.tzinfo is None:
        return None
    if value.tzinfo is UTC:
        return "UTC"
    return value.tzinfo.key if isinstance(value.tzinfo, ZoneInfo) else None


def _missing_zone_error(value: datetime | None) -> InvalidInstant:
    if value is not None and value.tzinfo is None:
        return InvalidInstant(
            f"run_at has no time zone: {value.isoformat()}. Timebell never guesses.",
            code="RUN_AT_WITHOUT_TIMEZONE",
            fix='Pass timezone="Asia/Seoul", or a datetime with tzinfo=ZoneInfo("Asia/Seoul").',
        )
    if value is not None:
        problem = f"run_at has an offset, but no time zone: {value.isoformat()}. There is no default."
    else:
        problem = "No time zone was specified, and there is no default."
    return InvalidInstant(
        problem,
        code="TIMEZONE_MISSING",
        fix=TIMEZONE_FIX,
    )
