"""Campaign states and actions, recipient counts, and the timetable of chunks. Pure.

The send time of a recipient is decided in this order, each step using the result of the previous one:

1. **The instant**: the same for all, or a local time in each recipient's zone. A local time that the clock skips is
   resolved as in RFC 5545 (02:30 becomes 03:30); of a repeated local time the first instant is used.
2. **Quiet hours** in the recipient's zone: recipients wait until they end, or are excluded.
3. **The throttle**: chunks of a maximum size, with a minimum interval. A chunk is never sent early to compensate.
4. **Quiet hours again**, as the throttle may have delayed a chunk into them; zones outside quiet hours go first.
5. **The expiry** of the campaign: recipients due later are excluded as `expired`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta
from enum import StrEnum

from timebell.errors import Conflict, InvalidInput
from timebell.recurrence import Zone, resolve_local

DAY_SECONDS = 86_400
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class CampaignState(StrEnum):
    """The state of a campaign."""

    PENDING = "pending"
    """Created; can be edited until it starts."""
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"
    """Stopped by a user, before all recipients were reached; final except for a retry."""
    COMPLETED = "completed"
    """Every recipient has a result, and none may be missing the message for a reason that can be mended."""
    PARTLY_SENT = "partly_sent"
    """Some recipients were not reached, or their result is unknown."""
    FAILED = "failed"
    """No message was accepted, although there were recipients."""


class CampaignAction(StrEnum):
    """An action on a campaign."""

    EDIT = "edit"
    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"
    FINISH = "finish"
    ARCHIVE = "archive"
    DELETE = "delete"
    RETRY = "retry"
    """Send again to the recipients that were not reached; never to those whose push was accepted."""


_S, _V = CampaignState, CampaignAction
TERMINAL_STATES = (_S.STOPPED, _S.COMPLETED, _S.PARTLY_SENT, _S.FAILED)
TRANSITIONS: dict[tuple[CampaignState, CampaignAction], CampaignState] = {
    (_S.PENDING, _V.EDIT): _S.PENDING,
    (_S.PENDING, _V.START): _S.RUNNING,
    (_S.PENDING, _V.STOP): _S.STOPPED,
    (_S.RUNNING, _V.PAUSE): _S.PAUSED,
    (_S.RUNNING, _V.STOP): _S.STOPPED,
    (_S.RUNNING, _V.FINISH): _S.COMPLETED,
    (_S.PAUSED, _V.EDIT): _S.PAUSED,
    (_S.PAUSED, _V.RESUME): _S.RUNNING,
    (_S.PAUSED, _V.STOP): _S.STOPPED,
    (_S.STOPPED, _V.RETRY): _S.RUNNING,
    (_S.COMPLETED, _V.RETRY): _S.RUNNING,
    (_S.PARTLY_SENT, _V.RETRY): _S.RUNNING,
    (_S.FAILED, _V.RETRY): _S.RUNNING,
    (_S.PENDING, _V.DELETE): _S.PENDING,
    **{(state, _V.ARCHIVE): state for state in TERMINAL_STATES},
    **{(state, _V.DELETE): state for state in TERMINAL_STATES},
}
_NO_OP_ACTIONS = {
    (_S.RUNNING, _V.START), (_S.RUNNING, _V.RESUME), (_S.PAUSED, _V.PAUSE), (_S.STOPPED, _V.STOP),
    (_S.COMPLETED, _V.FINISH), (_S.PARTLY_SENT, _V.FINISH), (_S.FAILED, _V.FINISH),
}  # fmt: skip


def next_state(state: CampaignState, action: CampaignAction) -> CampaignState:
    """Return the state after an action; repeating an action has no effect. Raises Conflict (CAMPAIGN_STATE)."""
    if (state, action) in _NO_OP_ACTIONS:
        return state
    if (state, action) not in TRANSITIONS:
        allowed = ", ".join(each.value for start, each in TRANSITIONS if start is state and each is not _V.FINISH)
        raise Conflict(
            f"The campaign is {state}, so {action} is not possible.",
            code="CAMPAIGN_STATE",
            fix=f"It allows: {allowed}.",
        )
    return TRANSITIONS[state, action]


@dataclass(slots=True)
class RecipientCounts:
    """Numbers of recipients by status; each recipient is counted once."""

    pending: int = 0
    accepted: int = 0
    refused: int = 0
    unknown: int = 0
    skipped: int = 0

    @property
    def total(self) -> int:
        """The number of all recipients."""
        return self.pending + self.accepted + self.refused + self.unknown + self.skipped

    @property
    def is_finished(self) -> bool:
        """True if no recipient is pending."""
        return self.pending == 0


class QuietHoursPolicy(StrEnum):
    """The treatment of recipients that are due during quiet hours."""

    WAIT = "wait"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class QuietHours:
    """Local times [start, end), across midnight if `end` is before `start`.

    Raises InvalidInput (INVALID_QUIET_HOURS) if both are equal or have a UTC offset.
    """

    start: time
    end: time
    policy: QuietHoursPolicy = QuietHoursPolicy.WAIT

    def __post_init__(self) -> None:
        if self.start == self.end or self.start.tzinfo is not None or self.end.tzinfo is not None:
            raise InvalidInput(
                "Quiet hours need two different local times, start and end.",
                code="INVALID_QUIET_HOURS",
                fix="E.g. 21:00 to 08:00.",
            )

    def quiet_until(self, at: datetime, zone: Zone) -> datetime | None:
        """Return the end of the quiet hours in progress in a zone at `at` (aware); None if there are none.

        An end that the clock skips is moved to the end of the gap. An end that the clock repeats occurs twice; the
        first occurrence after `at` counts.
        """
        local = zone.local(at).time()
        is_quiet = self.start <= local < self.end if self.start < self.end else local >= self.start or local < self.end
        if not is_quiet:
            return None
        day = _epoch_seconds(at) + zone.offset(_epoch_seconds(at))
        midnight = day - day % DAY_SECONDS
        end = self.end.hour * 3600 + self.end.minute * 60 + self.end.second
        ends = (
            second
            for days in range(3)
            for second in _instants_of_local(zone, midnight + days * DAY_SECONDS + end)
            if _EPOCH + timedelta(seconds=second) > at
        )
        return _EPOCH + timedelta(seconds=next(ends))


@dataclass(frozen=True, slots=True)
class Throttle:
    """At most `chunk_size` recipients per chunk, and at least `min_interval` between the starts of two chunks.

    Raises InvalidInput (INVALID_THROTTLE).
    """

    chunk_size: int = 500
    min_interval: timedelta = timedelta(seconds=2)

    def __post_init__(self) -> None:
        if not 1 <= self.chunk_size <= 500 or self.min_interval < timedelta(0):
            raise InvalidInput(
                "A chunk must have 1 to 500 recipients; the interval must not be negative.", code="INVALID_THROTTLE",
                fix="chunkSize 500 and chunkDelayMs 2000 are the defaults.",
            )  # fmt: skip


class ExclusionReason(StrEnum):
    """The reason why a device is excluded from a campaign."""

    FILTERS = "filters"
    """Does not match the filters other than consent."""
    PUSH_OFF = "pushOff"
    """Matches the other filters, but pushes are turned off."""
    MARKETING_OFF = "marketingOff"
    """Matches the other filters, but without consent to marketing."""
    NO_TOKEN = "noToken"  # noqa: S105 - not a secret
    """The audience row has no token."""
    CAPPED = "capped"
    """Has got as many messages as the frequency cap allows."""
    OTHER_DEVICE = "otherDevice"
    """Another device of the same user was chosen."""
    HOLD_OUT = "holdOut"
    """Chosen to get no message, for comparison."""
    QUIET = "quiet"
    """Due during quiet hours whose policy is `skip`."""
    EXPIRED = "expired"
    """Due after the campaign expires."""
    STOPPED = "stopped"
    """Not sent to before the campaign was stopped."""
    REMOVED = "removed"
    """Deleted after the campaign started and before its turn."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Recipients `first` to `first + size - 1` of a zone, in audience order, sent at an aware UTC instant."""

    at: datetime
    zone: str
    first: int
    size: int


@dataclass(slots=True)
class Timetable:
    """The chunks in time order, and the numbers of excluded recipients by zone and reason."""

    chunks: list[Chunk] = field(default_factory=list)
    excluded: dict[tuple[str, ExclusionReason], int] = field(default_factory=dict)

    def zone_summaries(self) -> Iterator[tuple[str, datetime, datetime, int]]:
        """Yield (zone, first chunk's instant, last chunk's instant, recipients), ordered by the first instant."""
        summaries: dict[str, tuple[datetime, datetime, int]] = {}
        for chunk in self.chunks:
            first, _, size = summaries.get(chunk.zone, (chunk.at, chunk.at, 0))
            summaries[chunk.zone] = first, chunk.at, size + chunk.size
        yield from ((zone, *summary) for zone, summary in summaries.items())


def build_timetable(
    audience: Mapping[Zone, int],
    send_at: datetime,
    *,
    now: datetime,
    quiet_hours: QuietHours | None = None,
    throttle: Throttle | None = None,
    until: datetime | None = None,
) -> Timetable:
    """Plan the chunks by the rules of this module.

    `audience` is the number of recipients per zone. `send_at` is an aware instant, or a naive local time in each
    recipient's zone. No chunk is planned before `now` (aware): a past local time is due immediately. `until` (aware)
    is the last instant at which a chunk may be sent; None: no limit.
    """
    throttle = throttle or Throttle()
    plan = Timetable()
    waiting: list[tuple[datetime, str, int]] = []
    zones = {zone.name: zone for zone in audience}
    remaining = {zone.name: count for zone, count in audience.items() if count > 0}
    for name in sorted(remaining):
        at = send_at if send_at.tzinfo is not None else resolve_local(send_at, zones[name])[0]
        heapq.heappush(waiting, (max(at.astimezone(UTC), now.astimezone(UTC)), name, 0))
    next_slot = now.astimezone(UTC)
    while waiting:
        due, name, first = heapq.heappop(waiting)
        at = max(due, next_slot)
        size_left = remaining[name] - first
        quiet_until = None if quiet_hours is None else quiet_hours.quiet_until(at, zones[name])
        if quiet_until is not None and quiet_hours is not None and quiet_hours.policy is QuietHoursPolicy.SKIP:
            plan.excluded[name, ExclusionReason.QUIET] = size_left
        elif quiet_until is not None:
            heapq.heappush(waiting, (quiet_until, name, first))
        elif until is not None and at > until:
            plan.excluded[name, ExclusionReason.EXPIRED] = size_left
        else:
            size = min(throttle.chunk_size, size_left)
            plan.chunks.append(Chunk(at, name, first, size))
            next_slot = at + throttle.min_interval
            if size_left > size:
                heapq.heappush(waiting, (due, name, first + size))
    return plan


def _epoch_seconds(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(seconds=1)


def _instants_of_local(zone: Zone, local_second: int) -> tuple[int, ...]:
    """Return the instants of a local second; if the clock skips it, the end of the gap."""
    return zone.instants(local_second) or ((end,) if (end := zone.gap_end(local_second)) is not None else ())
