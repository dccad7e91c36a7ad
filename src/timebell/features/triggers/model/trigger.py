"""Triggers: fire at the instant in a column of an external source, plus an offset. Pure.

An *item* is a row of a *source*, with the *fields* that the source reports. A trigger reads one field as an instant,
and desires a job at each offset from it, for each recipient. `reconcile` compares the desired firings with the
recorded *firings* and returns which jobs to create and to cancel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta
from enum import StrEnum
from hashlib import sha256
from typing import Any, NamedTuple

from timebell.errors import InvalidInput, InvalidInstant
from timebell.features.triggers.model.column_values import (
    MAX_KEY_LENGTH,
    MAX_YEAR,
    RANGE_EDGES,
    parse_column_instant,
    parse_column_zone,
    parse_recipients,
    parse_value_zone,
    resolve_to_utc,
    select_edge,
)
from timebell.model.condition import Comparison, lookup_path
from timebell.model.payload import sanitize_text
from timebell.model.schedule import Action
from timebell.recurrence import zone

DEFAULT_GRACE_SECONDS = 300.0
"""An instant that becomes known late still fires if it is at most this many seconds past."""
SOURCE_UNAUTHORIZED = "SOURCE_UNAUTHORIZED"
SOURCE_ROWS_REJECTED = "SOURCE_ROWS_REJECTED"
SOURCE_BUDGET_SPENT = "SOURCE_BUDGET_SPENT"
MAX_OFFSETS = 20  # of one trigger
UNREADABLE_KEY = "unreadable"
"""In place of an offset: the record of an item of which no offset is known."""
MAX_FORMER_JOBS = 20  # of one firing
OFFSET_STEP = re.compile(r"([+-]?)(\d{1,6})(bd|[smhdw])", re.ASCII)
OFFSET_PATTERN = re.compile(rf"(0|(?:{OFFSET_STEP.pattern})+)?(?:@(\d\d):(\d\d))?", re.ASCII)
MAX_OFFSET_LENGTH = 20
MAX_BUSINESS_DAYS = 1000
SATURDAY = 5  # of datetime.weekday()
OFFSET_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@dataclass(frozen=True, slots=True)
class Offset:
    """An offset from a column's instant, such as `0`, `-15m`, `-1d+9h` or `-3bd@09:00`.

    `steps` are applied in order. Days, weeks and business days (`bd`, Monday to Friday) are calendar units in the
    trigger's zone (same time of day); the others are elapsed time. `at` then sets the local time of day.
    """

    steps: tuple[tuple[int, str], ...] = ()
    at: time | None = None

    @classmethod
    def parse(cls, text: Any) -> Offset:
        """Parse an offset such as `-15m`. Raises InvalidInput (INVALID_OFFSET)."""
        written = text.strip() if isinstance(text, str) else ""
        match = OFFSET_PATTERN.fullmatch(written) if written else None
        found = OFFSET_STEP.findall(match[1] or "") if match is not None else []
        steps = tuple((int(count) * (-1 if sign == "-" else 1), unit) for sign, count, unit in found if int(count))
        try:
            at = None if match is None or match[5] is None else time(int(match[5]), int(match[6]))
        except ValueError:
            match, at = None, None
        offset = cls(steps, at)
        too_many = any(unit == "bd" and abs(count) > MAX_BUSINESS_DAYS for count, unit in steps)
        if match is None or too_many or len(str(offset)) > MAX_OFFSET_LENGTH:
            raise InvalidInput(
                f"offset is {text!r:.40}.",
                code="INVALID_OFFSET",
                fix="Use 0, or numbers with units (s, m, h, d, bd or w), and a time of day: -15m, -1d+9h, -3bd@09:00.",
            )
        return offset

    def __str__(self) -> str:
        steps = "".join(f"{count:+}{unit}" for count, unit in self.steps)
        return f"{steps}@{self.at:%H:%M}" if self.at is not None else steps or "0"

    def apply(self, at: datetime, timezone: str) -> datetime | None:
        """Return the instant at this offset from `at`; None outside the years 1970 to MAX_YEAR."""
        moved = at
        try:
            for count, unit in self.steps:
                if unit in OFFSET_UNITS and unit not in ("d", "w"):
                    moved += timedelta(**{OFFSET_UNITS[unit]: count})
                else:
                    moved = resolve_to_utc(_add_days(_to_local(moved, timezone), count, unit), timezone)
            if self.at is not None:
                moved = resolve_to_utc(datetime.combine(_to_local(moved, timezone), self.at), timezone)
        except (OverflowError, InvalidInstant):
            return None
        return moved if 1970 <= moved.year <= MAX_YEAR else None


def _to_local(at: datetime, timezone: str) -> datetime:
    return zone(timezone).local(at).replace(tzinfo=None)


def _add_days(local: datetime, count: int, unit: str) -> datetime:
    """Add days, weeks, or business days (Monday to Friday) to a local time."""
    if unit != "bd":
        return local + timedelta(**{OFFSET_UNITS[unit]: count})
    step = timedelta(days=1 if count > 0 else -1)
    for _ in range(abs(count)):
        local += step
        while local.weekday() >= SATURDAY:
            local += step
    return local


class FiringKey(NamedTuple):
    """Identifies one firing of a trigger for an item: an offset and a recipient (empty: no recipient)."""

    offset: str
    recipient: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerRule:
    """The firing rule of a trigger.

    `column` names the field with the instant, or a range, of which `edge` selects the start or the end. A value
    without a UTC offset is local time in the zone that it contains (RFC 9557), or that the field `zone_column` names;
    in `timezone` if there is no such field, or if it is empty or invalid. `recipients` names the field with the
    recipients, a string or a list of strings. `grace` is in seconds. `unless` is a query to the source; the trigger
    does not fire if it returns a row.
    """

    column: str
    offsets: tuple[Offset, ...] = (Offset(),)
    timezone: str | None = None
    zone_column: str | None = None
    edge: str = "start"
    recipients: str | None = None
    condition: tuple[Comparison, ...] = ()
    unless: str | None = None
    grace: float = DEFAULT_GRACE_SECONDS

    def __post_init__(self) -> None:
        """Raise InvalidInput (TIMEZONE_MISSING) if an offset sets a time of day and the rule has no time zone."""
        at_time = next((offset for offset in self.offsets if offset.at is not None), None)
        if at_time is not None and self.timezone is None and self.zone_column is None:
            raise InvalidInput(
                f"The offset {at_time} is a local time of day, but the trigger has no time zone.",
                code="TIMEZONE_MISSING", fix="Specify the timezone, or the column with the time zone of each row.",
            )  # fmt: skip

    def columns(self) -> list[tuple[str, str]]:
        """Return the columns that the rule reads, each with the option that names it."""
        named = [("column", self.column), ("zone_column", self.zone_column), ("recipients", self.recipients)]
        named += [("a field of condition", comparison.field) for comparison in self.condition]
        return [(option, column) for option, column in named if column is not None]

    def describe_unreadable(self, fields: Mapping[str, Any]) -> str:
        """Return the value that cannot be read, with its column."""
        value = self._find_instant(fields)
        timezone = self._find_zone(value, fields)
        if self.zone_column is not None and timezone is None:
            return f"{self.zone_column}: {lookup_path(fields, self.zone_column)!r:.200} is not a time zone"
        if timezone is None and parse_column_instant(value, "UTC") != parse_column_instant(value, None):
            return f"{self.column}: {value!r:.200} is a local time, and no time zone is specified"
        is_readable = parse_column_instant(value, timezone) is not None
        column = self.recipients if is_readable and self.recipients is not None else self.column
        return f"{column}: {lookup_path(fields, column)!r:.200}"

    def _find_instant(self, fields: Mapping[str, Any]) -> Any:
        return select_edge(lookup_path(fields, self.column), self.edge)

    def _find_zone(self, value: Any, fields: Mapping[str, Any]) -> str | None:
        """Return the zone of a row: that of the value, or of `zone_column`, or of the trigger."""
        named = parse_value_zone(value)
        if named is None and self.zone_column is not None:
            named = parse_column_zone(lookup_path(fields, self.zone_column))
        return named or self.timezone

    def desired_firings(self, fields: Mapping[str, Any] | None) -> DesiredFirings:
        """Return the firings desired for an item with these fields (None: the item was deleted)."""
        value = None if fields is None else self._find_instant(fields)
        if fields is None or value is None or value == "":
            return DesiredFirings({}, ColumnStatus.EMPTY)
        timezone = self._find_zone(value, fields)
        if self.zone_column is not None and timezone is None:
            return DesiredFirings({}, ColumnStatus.UNREADABLE)
        at = parse_column_instant(value, timezone)
        recipients = [""] if self.recipients is None else parse_recipients(lookup_path(fields, self.recipients))
        if at is None or recipients is None:
            return DesiredFirings({}, ColumnStatus.UNREADABLE)
        instants: dict[FiringKey, datetime] = {}
        for offset in self.offsets:
            due, text = offset.apply(at, timezone or "UTC"), str(offset)
            if due is not None:
                for recipient in recipients:
                    instants[FiringKey(text, recipient)] = due
        return DesiredFirings(instants, ColumnStatus.READABLE, timezone or "UTC")


class ColumnStatus(StrEnum):
    """The result of reading an item's columns."""

    READABLE = "read"
    EMPTY = "none"
    UNREADABLE = "unreadable"


class DesiredFirings(NamedTuple):
    """The instants at which a trigger should fire for an item, and the zone of its local times."""

    instants: dict[FiringKey, datetime]
    column_status: ColumnStatus
    timezone: str = "UTC"


def parse_version(value: Any) -> int:
    """Return a version as an integer; an RFC 3339 instant becomes microseconds since 1970.

    Raises InvalidInput (INVALID_VERSION).
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    if isinstance(value, str):
        if len(value) < 20 and value.isascii() and value.isdigit() and int(value) < 2**63:
            return int(value)
        instant = parse_column_instant(value, None)
        if instant is not None:
            return epoch_micros(instant)
    raise InvalidInput(
        f"version is {value!r:.60}.", code="INVALID_VERSION",
        fix="Use an integer that increases with each change, or the instant of the change: 2027-03-14T07:00:00.25Z.",
    )  # fmt: skip


def key_problem(key: str) -> str | None:
    """Return why an item key cannot be stored; None if it can."""
    if len(key) > MAX_KEY_LENGTH:
        return f"{key!r:.60}: the key has {len(key):,} characters; the limit is {MAX_KEY_LENGTH}."
    return None if sanitize_text(key, MAX_KEY_LENGTH) == key else f"{key!r:.60}: the key has invalid characters."


def epoch_micros(at: datetime) -> int:
    """Return an aware instant as microseconds since 1970."""
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def firing_job_key(trigger_id: str, item: str, firing_key: FiringKey) -> str:
    """Return the key of the one live job of a firing. Distinct firings have distinct keys for any names."""
    parts = ["trigger", trigger_id, _escape_part(item), firing_key.offset]
    key = "__".join([*parts, _escape_part(firing_key.recipient)] if firing_key.recipient else parts)
    if len(key) <= MAX_KEY_LENGTH:
        return key
    return f"trigger__{trigger_id}__{sha256(key.encode()).hexdigest()}"


def _escape_part(name: str) -> str:
    """Escape underscores at the ends of a part and next to another one, so that `__` only separates parts."""
    quoted = name.replace("%", "%25")
    if "_" not in quoted:
        return quoted
    return re.sub(r"^_|_$|_(?=_)|(?<=_)_", "%5F", quoted)


class FormerJob(NamedTuple):
    """A job that a firing had before: its id, its instant in microseconds since 1970, and whether it started."""

    id: str
    at: int
    fired: bool


class NotFired(NamedTuple):
    """Why nothing is planned for a firing, with the value or the instant.

    `reason` is `late` (known too late), `past` (more than a day ago), `unreadable`, or `skipped` (by a user).
    """

    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Firing:
    """The record of one planned firing.

    `job_id` was created for the instant `at` (None: no job) by `revision` of the trigger. `fired_at` is the latest
    instant for which a job has started, `history` are the jobs before `job_id`. `not_fired` is why there is no job.
    """

    at: datetime | None
    job_id: str | None = None
    revision: int = 1
    fired_at: datetime | None = None
    history: tuple[FormerJob, ...] = ()
    not_fired: NotFired | None = None

    def has_fired(self, at: datetime) -> bool:
        """Return whether a job has started for an instant."""
        return self.fired_at == at or any(job.fired and job.at == epoch_micros(at) for job in self.history)


@dataclass(frozen=True, slots=True)
class FiringChanges:
    """The changes that turn the recorded firings into the desired ones. A move is a cancel and a create."""

    create: dict[FiringKey, datetime] = field(default_factory=dict)
    cancel: list[FiringKey] = field(default_factory=list)
    too_late: list[FiringKey] = field(default_factory=list)
    """Desired, but past by more than the grace."""

    def __bool__(self) -> bool:
        return bool(self.create or self.cancel)


def reconcile(
    desired: Mapping[FiringKey, datetime],
    firings: Mapping[FiringKey, Firing],
    revision: int,
    now: datetime,
    grace: float,
) -> FiringChanges:
    """Compare the desired with the recorded firings.

    An instant that is planned or has fired is not created again, however often it is reported. A past instant is
    created within `grace` seconds. A firing that is not desired, or desired at another instant, is cancelled. A new
    `revision` of the trigger replaces the jobs of future firings.
    """
    changes = FiringChanges()
    oldest = now - timedelta(seconds=grace)
    for key, at in desired.items():
        planned = firings.get(key)
        if planned is not None and planned.at == at and (planned.revision == revision or at <= now):
            continue
        fired = planned is not None and planned.has_fired(at)
        late = at < oldest
        if planned is not None and planned.at is not None:
            changes.cancel.append(key)
        if late and not fired:
            changes.too_late.append(key)
        if not late and not fired:
            changes.create[key] = at
    if firings:
        changes.cancel.extend(key for key, firing in firings.items() if firing.at is not None and key not in desired)
    return changes


def parse_offsets(offsets: Any) -> tuple[Offset, ...]:
    """Parse one offset or a list of 1 to MAX_OFFSETS, without duplicates. Raises InvalidInput (INVALID_OFFSET)."""
    values: Iterable[Any] = [offsets] if isinstance(offsets, str | Offset) else offsets
    if not isinstance(values, list | tuple) or not 0 < len(values) <= MAX_OFFSETS:
        raise InvalidInput(
            f"offsets is {offsets!r:.60}.", code="INVALID_OFFSET", fix=f'Give 1 to {MAX_OFFSETS}, e.g. ["-15m", "0"].'
        )
    return tuple(dict.fromkeys(one if isinstance(one, Offset) else Offset.parse(one) for one in values))


def parse_edge(edge: Any) -> str:
    """Return the edge of a range that fires, `start` or `end`. Raises InvalidInput (INVALID_EDGE)."""
    if edge not in RANGE_EDGES:
        raise InvalidInput(f"edge is {edge!r:.40}.", code="INVALID_EDGE", fix="Use start or end.")
    return str(edge)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An external source of items.

    `options` depend on its `kind`. `error` and `error_code` describe the current failure, if any. An orphaned source
    has lost access to its items (`orphaned_reason`); it recovers if access returns.
    """

    id: str
    tenant_id: str
    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    cursor: str | None = None
    synced_at: datetime | None = None
    error: str | None = None
    error_code: str | None = None
    orphaned_at: datetime | None = None
    orphaned_reason: str | None = None
    created_at: datetime
    created_by: str | None = None
    updated_at: datetime

    @property
    def state(self) -> str:
        """`ready`, `errored`, `reauthorize` (new tokens are required) or `orphaned`."""
        if self.orphaned_at is not None:
            return "orphaned"
        if self.error is None:
            return "ready"
        return "reauthorize" if self.error_code == SOURCE_UNAUTHORIZED else "errored"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """A stored trigger.

    `source` is the name of its source, `source_label` the source's label in job payloads. `orphaned_reason` is set
    while the source is orphaned, `unauthorized_reason` while its tokens are rejected.
    """

    id: str
    tenant_id: str
    name: str
    source_id: str
    source: str
    source_label: str = ""
    orphaned_reason: str | None = None
    unauthorized_reason: str | None = None
    rule: TriggerRule
    action: Action
    enabled: bool = True
    pause_reason: str | None = None
    revision: int = 1
    created_at: datetime
    created_by: str | None = None
    updated_at: datetime

    @property
    def state(self) -> str:
        """`ready`, `paused`, `orphaned` or `reauthorize` (due firings wait for new tokens)."""
        if not self.enabled:
            return "paused"
        if self.orphaned_reason is not None:
            return "orphaned"
        return "ready" if self.unauthorized_reason is None else "reauthorize"


class ItemChange(NamedTuple):
    """The fields of an item as reported by a source (None: the item was deleted), with their version.

    A change without a version counts as newer than the stored item. With a `problem`, the row exists and cannot be
    read: the item keeps its fields.
    """

    key: str
    version: int | None
    fields: Mapping[str, Any] | None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookNotice:
    """A webhook's report that an item was changed or deleted.

    `at` is the instant of the change, if reported; `column` and `value` the changed field, if reported.
    """

    key: str
    at: datetime | None = None
    deleted: bool = False
    column: str | None = None
    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """The latest known version of an item; `fields` None: it was deleted.

    `problem` is why the current row is rejected; then `fields` are those of an earlier one.
    """

    key: str
    version: int
    fields: dict[str, Any] | None
    problem: str | None = None
    updated_at: datetime


@dataclass(slots=True)
class ChangeSummary:
    """The result of applying item changes.

    Items are counted as `changed`, `unchanged` (equal to the stored item) or `stale` (older than the stored item),
    and as `unreadable` if a trigger could not read an instant. Jobs are counted as `created`, `cancelled` (a move
    counts as both) or `late` (past by more than the grace, so not created). `rejected` has the reasons of rows that
    cannot be stored; the stored items of these keys are unchanged.
    """

    changed: int = 0
    unchanged: int = 0
    stale: int = 0
    created: int = 0
    cancelled: int = 0
    late: int = 0
    unreadable: int = 0
    rejected: list[str] = field(default_factory=list)

    def add(self, other: ChangeSummary) -> None:
        """Add the counts and rejections of another summary."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
