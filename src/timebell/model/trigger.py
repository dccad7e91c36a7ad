"""A trigger: fire at the instant in somebody else's column, plus an offset. All of it pure.

An *item* is a row of a *source*; its *fields* are what the source says of it. A trigger reads one field as an instant
and wants a job at each offset from it, one for each recipient. What it wants is held against its *firings*, the
memory of what was planned, and that gives what is to be made, moved and cancelled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from typing import Any, NamedTuple

from timebell.errors import InvalidInput, InvalidInstant
from timebell.model.condition import Comparison
from timebell.model.payload import legible
from timebell.model.schedule import Action
from timebell.recurrence import resolve_local, zone

GRACE = 300.0
"""Seconds by which an instant may be past and still fire, when it is learnt of late."""
LONGEST_KEY = 200
UNAUTHORISED = "SOURCE_UNAUTHORIZED"
SET_ASIDE = "SOURCE_ROWS_SET_ASIDE"
RECIPIENTS = 1000  # of one item
OFFSETS = 20  # of one trigger
LAST_YEAR = 2199
OFFSET = re.compile(r"([+-]?)(\d{1,6})([smhdw]?)", re.ASCII)
SPANS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@dataclass(frozen=True, slots=True)
class Offset:
    """A step from a column's value: `0`, `-15m`, `+1d`. Days and weeks are of the calendar, in the trigger's zone
    (the same time of day), the others elapse."""

    count: int
    unit: str = "s"

    @classmethod
    def read(cls, text: Any) -> Offset:
        """Raises InvalidInput (INVALID_OFFSET)."""
        found = OFFSET.fullmatch(text.strip()) if isinstance(text, str) else None
        if found is None or (not found[3] and int(found[2])):
            raise InvalidInput(
                f"offset is {text!r:.40}.", code="INVALID_OFFSET", fix="Write 0, or like -15m, +2h, +1d: s, m, h, d, w."
            )
        count = int(found[2]) * (-1 if found[1] == "-" else 1)
        return cls(count, found[3] if count else "s")

    def __str__(self) -> str:
        return f"{self.count:+}{self.unit}" if self.count else "0"

    def after(self, at: datetime, timezone: str) -> datetime | None:
        """The instant at this offset from one; None beyond the years that count."""
        span = timedelta(**{SPANS[self.unit]: self.count})
        try:
            if self.unit not in ("d", "w") or not self.count:
                moved = at + span
            else:
                moved, _ = resolve_local(zone(timezone).local(at).replace(tzinfo=None) + span, zone(timezone))
        except (OverflowError, InvalidInstant):
            return None
        return moved if 1970 <= moved.year <= LAST_YEAR else None


class Place(NamedTuple):
    """What a trigger fires of one item: an offset, for a recipient (empty: for nobody in particular)."""

    offset: str
    recipient: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When a trigger fires. `column` holds the instant, `recipients` whom it is for: text, or a list of it.

    Values without an offset from UTC are wall time in `timezone`. `grace` is in seconds. `unless` is a query to the
    source: whatever it finds speaks against firing.
    """

    column: str
    offsets: tuple[Offset, ...] = (Offset(0),)
    timezone: str | None = None
    recipients: str | None = None
    condition: tuple[Comparison, ...] = ()
    unless: str | None = None
    grace: float = GRACE

    def wanted(self, fields: Mapping[str, Any] | None) -> Wanted:
        """What it wants of an item with these fields (None: it is gone)."""
        value = None if fields is None else fields.get(self.column)
        if fields is None or value is None or value == "":
            return Wanted({}, Value.NONE)
        at = instant_of(value, self.timezone)
        people = [""] if self.recipients is None else people_of(fields.get(self.recipients))
        if at is None or people is None:
            return Wanted({}, Value.UNREADABLE)
        places: dict[Place, datetime] = {}
        for offset in self.offsets:
            due = offset.after(at, self.timezone or "UTC")
            if due is not None:
                places |= {Place(str(offset), person): due for person in people}
        return Wanted(places, Value.READ)


class Value(StrEnum):
    """What was found in a column."""

    READ = "read"
    NONE = "none"
    UNREADABLE = "unreadable"


class Wanted(NamedTuple):
    """What a trigger wants of an item: the instants it is to fire at."""

    places: dict[Place, datetime]
    value: Value


def instant_of(value: Any, timezone: str | None) -> datetime | None:
    """A column's value as an aware UTC instant: ISO 8601 text, of which a date alone is its first instant in the zone.
    None for what cannot be read, or is local time and no zone is declared."""
    if not isinstance(value, str) or len(value) > 64:
        return None
    try:
        found = datetime.fromisoformat(value.strip())
        if found.tzinfo is None:
            found = resolve_local(found, zone(timezone))[0] if timezone is not None else None  # type: ignore[assignment]
        else:
            found = found.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return found if found is not None and 1970 <= found.year <= LAST_YEAR else None


def people_of(value: Any) -> list[str] | None:
    """The recipients in a field, each once; nobody for an empty one, None for what names no people."""
    if value is None or value == "":
        return []
    listed = value if isinstance(value, list) else [value]
    people = [str(one) for one in listed if isinstance(one, str | int) and not isinstance(one, bool)]
    if len(people) != len(listed) or len(people) > RECIPIENTS or not all(0 < len(one) <= LONGEST_KEY for one in people):
        return None
    return list(dict.fromkeys(people))


def version_of(value: Any) -> int:
    """A version as a number: a whole one, or an RFC 3339 instant as microseconds since 1970.

    Raises InvalidInput (INVALID_VERSION).
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    if isinstance(value, str):
        if len(value) < 20 and value.isascii() and value.isdigit() and int(value) < 2**63:
            return int(value)
        found = instant_of(value, None)
        if found is not None:
            return micros(found)
    raise InvalidInput(
        f"version is {value!r:.60}.", code="INVALID_VERSION",
        fix="Give a whole number that rises with each change, or the instant of the change: 2027-03-14T07:00:00.25Z.",
    )  # fmt: skip


def unfit_key(key: str) -> str | None:
    """Why no store keeps a row under this key; None if they do."""
    if len(key) > LONGEST_KEY:
        return f"{key!r:.60}: the key has {len(key):,} characters; the limit is {LONGEST_KEY}."
    return None if legible(key, LONGEST_KEY) == key else f"{key!r:.60}: the key has characters that are no text."


def micros(at: datetime) -> int:
    """Microseconds since 1970."""
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def key_of(trigger_id: str, item: str, place: Place) -> str:
    """The key of the one live job for a place of an item. No two places share one, whatever their names are."""
    parts = ["trigger", trigger_id, _part(item), place.offset]
    key = "__".join([*parts, _part(place.recipient)] if place.recipient else parts)
    if len(key) <= LONGEST_KEY:
        return key
    return f"trigger__{trigger_id}__{sha256(key.encode()).hexdigest()}"


def _part(name: str) -> str:
    """A name in which two underscores never meet, nor a part's edge."""
    quoted = name.replace("%", "%25")
    return re.sub(r"^_|_$|_(?=_)|(?<=_)_", "%5F", quoted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Firing:
    """What was planned for a place: the job made for the instant `at` (None: nothing), by which revision of the
    trigger; and the last instant that a job of it has started for."""

    at: datetime | None
    job_id: str | None = None
    revision: int = 1
    fired_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Steps:
    """What brings firings to what is wanted. A move is a cancel and a make."""

    make: dict[Place, datetime] = field(default_factory=dict)
    cancel: list[Place] = field(default_factory=list)
    late: list[Place] = field(default_factory=list)
    """Wanted, but past by more than the grace."""

    def __bool__(self) -> bool:
        return bool(self.make or self.cancel)


def reconcile(
    wanted: Mapping[Place, datetime], firings: Mapping[Place, Firing], revision: int, now: datetime, grace: float
) -> Steps:
    """Hold what is wanted against what was planned.

    An instant that was planned or has fired is not made again, however often it is reported. One that is past is made
    within the grace. What is no longer wanted, or wanted at another instant, is cancelled. A new revision of the
    trigger makes again what is still to come.
    """
    steps = Steps()
    oldest = now - timedelta(seconds=grace)
    for place, at in wanted.items():
        planned = firings.get(place)
        if planned is not None and planned.at == at and (planned.revision == revision or at <= now):
            continue
        fired = planned is not None and planned.fired_at == at
        late = at < oldest
        if planned is not None and planned.at is not None:
            steps.cancel.append(place)
        if late and not fired:
            steps.late.append(place)
        if not late and not fired:
            steps.make[place] = at
    steps.cancel.extend(place for place, one in firings.items() if one.at is not None and place not in wanted)
    return steps


def offsets_of(given: Any) -> tuple[Offset, ...]:
    """Offsets as they are written, each once. Raises InvalidInput (INVALID_OFFSET)."""
    listed: Iterable[Any] = [given] if isinstance(given, str | Offset) else given
    if not isinstance(listed, list | tuple) or not 0 < len(listed) <= OFFSETS:
        raise InvalidInput(
            f"offsets is {given!r:.60}.", code="INVALID_OFFSET", fix=f'Give 1 to {OFFSETS}, e.g. ["-15m", "0"].'
        )
    return tuple(dict.fromkeys(one if isinstance(one, Offset) else Offset.read(one) for one in listed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where dated rows are. `options` are those of its kind; a `fault` is what is wrong with it now, `fault_code` its
    code. Access to an orphaned one was lost (`orphaned_reason`); it may come back."""

    id: str
    tenant_id: str
    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    cursor: str | None = None
    synced_at: datetime | None = None
    fault: str | None = None
    fault_code: str | None = None
    orphaned_at: datetime | None = None
    orphaned_reason: str | None = None
    created_at: datetime
    created_by: str | None = None
    updated_at: datetime

    @property
    def state(self) -> str:
        """`ready`, `failing`, `reauthorise` (somebody has to give new tokens) or `orphaned`."""
        if self.orphaned_at is not None:
            return "orphaned"
        if self.fault is None:
            return "ready"
        return "reauthorise" if self.fault_code == UNAUTHORISED else "failing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """A trigger as it is stored. `source` is the name of its source, `board` what jobs say of it; `orphaned` is why
    access to that was lost, if it was, `unauthorised` that its tokens are not taken any more."""

    id: str
    tenant_id: str
    name: str
    source_id: str
    source: str
    board: str = ""
    orphaned: str | None = None
    unauthorised: str | None = None
    rule: Rule
    action: Action
    enabled: bool = True
    pause_reason: str | None = None
    revision: int = 1
    created_at: datetime
    created_by: str | None = None
    updated_at: datetime

    @property
    def state(self) -> str:
        """`ready`, `paused`, `orphaned` or `reauthorise` (what is due waits for new tokens)."""
        if not self.enabled:
            return "paused"
        if self.orphaned is not None:
            return "orphaned"
        return "ready" if self.unauthorised is None else "reauthorise"


@dataclass(frozen=True, slots=True)
class Change:
    """What a source says of an item: its fields (None: it is gone), as of a version. Without a version it is taken for
    newer than what is known."""

    key: str
    version: int | None
    fields: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a webhook says of an item: that it has changed, or is gone. `at` is when, if it says so; `column` what has
    the value now, if it says that."""

    key: str
    at: datetime | None = None
    gone: bool = False
    column: str | None = None
    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A row of a source, as it was last heard of; `fields` None: it is gone."""

    key: str
    version: int
    fields: dict[str, Any] | None
    updated_at: datetime


@dataclass(slots=True)
class Observed:
    """What changes came to: so many items were `changed`, `same` as known, or `stale`, as something newer was known.

    Of jobs: `made`, `cancelled` (of which a move is one, and one made), `late` (past by more than the grace, so not
    made), and items of which a trigger can read no instant (`unreadable`).

    `unfit` are rows that cannot be kept, each with the reason: they are set aside, and what was known of them stays.
    """

    changed: int = 0
    same: int = 0
    stale: int = 0
    made: int = 0
    cancelled: int = 0
    late: int = 0
    unreadable: int = 0
    unfit: list[str] = field(default_factory=list)

    def add(self, more: Observed) -> None:
        """Count what other changes came to, too."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(more, name))
