"""What a person gives as a time, read strictly: an aware datetime, a local one with a zone, or ISO 8601 text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from timebell.errors import InThePast, InvalidInput, InvalidInstant
from timebell.recurrence import Zone, resolve_local, zone
from timebell.recurrence.describe import describe_date

PAST_GRACE = timedelta(seconds=5)
LAST_YEAR = 2199


@dataclass(slots=True)
class When:
    """An instant (aware UTC), the zone it was meant in, and `gap` or `fold` if its local time was adjusted.

    One that was given as local time keeps it, with the release of the zone data that made it an instant.
    """

    at: datetime
    timezone: str
    note: str | None = None
    local_time: str | None = None

    def fields(self) -> dict[str, Any]:
        """What a NewJob says of its time."""
        tzdata = None if self.local_time is None else zone(self.timezone).release.version
        return {
            "run_at": self.at, "timezone": self.timezone, "adjusted": self.note, "local_time": self.local_time,
            "tzdata": tzdata,
        }  # fmt: skip


def read(
    value: datetime | str | None,
    timezone_name: str | None,
    default: str | None,
    now: datetime,
    on_gap: str = "shift",
    on_fold: str = "first",
) -> When:
    """Resolve `run_at`. None means now; a naive time is wall time in the zone.

    One that the clock skips or repeats is resolved by RFC 5545, 3.3.5, or refused with "error": RUN_AT_IN_GAP,
    RUN_AT_AMBIGUOUS. A repeated one with `fold=1` is the second (PEP 495). The zone is the one given, or that of the
    datetime's own ZoneInfo, or the default; without any of them it is refused: RUN_AT_WITHOUT_TIMEZONE,
    TIMEZONE_MISSING, INVALID_TIMEZONE, RUN_AT_INVALID, SCHEDULE_IN_THE_PAST, INVALID_ON_GAP, INVALID_ON_FOLD.
    """
    if on_gap not in ("shift", "error"):
        raise InvalidInput(f"on_gap is {on_gap!r:.60}.", code="INVALID_ON_GAP", fix="Use shift or error.")
    if on_fold not in ("first", "error"):
        raise InvalidInput(
            f"on_fold is {on_fold!r:.60}.", code="INVALID_ON_FOLD",
            fix="Use first or error; fold=1 in the datetime takes the second.",
        )  # fmt: skip
    if isinstance(value, str):
        value = _parse(value)
    if value is not None and not isinstance(value, datetime):
        raise InvalidInstant(
            f"run_at is {value!r}, which is not a datetime.",
            fix="Give a datetime with a time zone, or ISO 8601 text.",
        )
    named = timezone_name or _own_zone(value) or default
    if named is None:
        raise _zoneless(value)
    place = zone(named)
    if value is None:
        return When(now, named)
    note = local_time = None
    if value.tzinfo is None:
        local_time = value.isoformat()
        at, note = resolve_local(value, place)
        if note == "fold" and value.fold:
            at, note = value.replace(tzinfo=place.info).astimezone(UTC), None
        if (note == "gap" and on_gap == "error") or (note == "fold" and on_fold == "error"):
            raise _adjusted(value, place, note)
    else:
        at = _in_utc(value)
    if at < now - PAST_GRACE:
        raise InThePast(
            f"Cannot schedule in the past: run_at is {at.isoformat()}, now is {now.isoformat(timespec='seconds')}.",
            fix="Give a later time, or leave run_at out to run now.",
        )
    if at.year > LAST_YEAR:
        raise InvalidInstant(f"run_at is in the year {at.year}; the last one is {LAST_YEAR}.")
    return When(at, named, note, local_time)


def read_alike(values: Sequence[Any], now: datetime) -> list[datetime] | None:
    """What `read` makes of times that are all None, or all aware and in one zone; None if it must read them one by one,
    as others or to say what is wrong."""
    kinds = set(map(type, values))
    if kinds == {type(None)}:
        return [now] * len(values)
    if kinds != {datetime}:
        return None
    zone_of = values[0].tzinfo
    if zone_of is None or not all(value.tzinfo is zone_of for value in values):
        return None
    try:
        instants = [value.astimezone(UTC) for value in values]
    except OverflowError:
        return None
    return instants if min(instants) >= now - PAST_GRACE and max(instants).year <= LAST_YEAR else None


def _adjusted(wall: datetime, place: Zone, note: str) -> InvalidInstant:
    """The refusal of a local time that the clock skips or repeats, with both readings of it."""
    both = [place.local(wall.replace(tzinfo=place.info, fold=fold).astimezone(UTC)) for fold in (0, 1)]
    when = f"on {describe_date(wall)} in {place.name}"
    if note == "gap":
        written = [f"{_clock(one, None if one.date() == wall.date() else one)} ({one.tzname()})" for one in both]
        return InvalidInstant(
            f"{_clock(wall)} does not exist {when}.", code="RUN_AT_IN_GAP", fix=f"Write {written[0]} or {written[1]}."
        )
    written = [f"{one.isoformat()} ({one.tzname()})" for one in both]
    return InvalidInstant(
        f"{_clock(wall)} happens twice {when}.", code="RUN_AT_AMBIGUOUS",
        fix=f"Write {written[0]} or {written[1]}; fold=1 in a datetime takes the second.",
    )  # fmt: skip


def _clock(wall: datetime, day: datetime | None = None) -> str:
    """The time of day as short as it can be said, with the date where one has to be given."""
    clock = wall.time().isoformat("auto" if wall.second or wall.microsecond else "minutes")
    return clock if day is None else f"{clock} on {describe_date(day)}"


def _parse(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as bad:
        raise InvalidInstant(
            f"run_at {text[:60]!r} is not a date and time: {bad}.",
            fix="Write it as 2027-03-14T09:30:00Z, or as local time with a timezone beside it.",
        ) from bad


def _in_utc(value: datetime) -> datetime:
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise InvalidInstant(f"run_at is in the year {value.year}; the last one is {LAST_YEAR}.") from None


def _own_zone(value: datetime | None) -> str | None:
    if value is None or value.tzinfo is None:
        return None
    if value.tzinfo is UTC:
        return "UTC"
    return value.tzinfo.key if isinstance(value.tzinfo, ZoneInfo) else None


def _zoneless(value: datetime | None) -> InvalidInstant:
    if value is not None and value.tzinfo is None:
        return InvalidInstant(
            f"run_at has no time zone: {value.isoformat()}. Timebell never guesses.",
            code="RUN_AT_WITHOUT_TIMEZONE",
            fix='Pass timezone="Asia/Seoul", or a datetime with tzinfo=ZoneInfo("Asia/Seoul").',
        )
    return InvalidInstant(
        "No time zone was given, and there is no default.",
        code="TIMEZONE_MISSING",
        fix='Pass timezone="Asia/Seoul", or set a default with Timebell(timezone=...).',
    )
