"""A campaign: what may be done with it in which state, what became of whom, and when each chunk is sent. Pure.

When a recipient is sent to is decided in one order, each step on what the one before it left:

1. **The instant**: the same for all, or a local time where each recipient is. A local time that the clock skips is read
   as RFC 5545 does (02:30 becomes 03:30), the first of two that it repeats.
2. **Quiet hours** where the recipient is: who would be woken waits until they end, or is left out.
3. **The throttle**: chunks of so many recipients, so far apart. A chunk is never sent early to make up for it.
4. **Quiet hours again**, as the throttle may have moved a chunk into them; others whose day has begun go first.
5. **The end** of the campaign: who would be sent to later is left out, as `expired`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta
from enum import StrEnum

from timebell.errors import Conflict, InvalidInput
from timebell.recurrence import Zone, resolve_local

DAY_S = 86_400
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class CampaignState(StrEnum):
    """Where it stands."""

    PENDING = "pending"
    """Made; may be edited until it starts."""
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"
    """By hand, for good: nobody else is sent to."""
    COMPLETED = "completed"


class CampaignVerb(StrEnum):
    """What may be asked of it."""

    EDIT = "edit"
    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"
    FINISH = "finish"
    RETRY = "retry"
    """Once more to those who were not reached: never to whom it was accepted for."""


_S, _V = CampaignState, CampaignVerb
MOVES: dict[tuple[CampaignState, CampaignVerb], CampaignState] = {
    (_S.PENDING, _V.EDIT): _S.PENDING,
    (_S.PENDING, _V.START): _S.RUNNING,
    (_S.PENDING, _V.STOP): _S.STOPPED,
    (_S.RUNNING, _V.PAUSE): _S.PAUSED,
    (_S.RUNNING, _V.STOP): _S.STOPPED,
    (_S.RUNNING, _V.FINISH): _S.COMPLETED,
    (_S.PAUSED, _V.RESUME): _S.RUNNING,
    (_S.PAUSED, _V.STOP): _S.STOPPED,
    (_S.STOPPED, _V.RETRY): _S.RUNNING,
    (_S.COMPLETED, _V.RETRY): _S.RUNNING,
}
_SAME = {
    (_S.RUNNING, _V.START), (_S.RUNNING, _V.RESUME), (_S.PAUSED, _V.PAUSE), (_S.STOPPED, _V.STOP),
    (_S.COMPLETED, _V.FINISH),
}  # fmt: skip


def after(state: CampaignState, verb: CampaignVerb) -> CampaignState:
    """The state that follows; what is done already may be asked again. Raises Conflict (CAMPAIGN_STATE)."""
    if (state, verb) in _SAME:
        return state
    if (state, verb) not in MOVES:
        allowed = ", ".join(each.value for start, each in MOVES if start is state and each is not _V.FINISH)
        raise Conflict(
            f"The campaign is {state}, so {verb} cannot be done.", code="CAMPAIGN_STATE", fix=f"It allows: {allowed}."
        )
    return MOVES[state, verb]


@dataclass(slots=True)
class Counts:
    """How many recipients stand where; together they are all there are."""

    pending: int = 0
    accepted: int = 0
    refused: int = 0
    unknown: int = 0
    skipped: int = 0

    @property
    def total(self) -> int:
        """Everybody."""
        return self.pending + self.accepted + self.refused + self.unknown + self.skipped

    @property
    def over(self) -> bool:
        """Whether nobody is left to send to."""
        return self.pending == 0


class InQuiet(StrEnum):
    """What becomes of those who would be woken."""

    WAIT = "wait"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class QuietHours:
    """Local times [start, end), over midnight if `end` is before `start`. Raises InvalidInput (QUIET_HOURS_INVALID)."""

    start: time
    end: time
    then: InQuiet = InQuiet.WAIT

    def __post_init__(self) -> None:
        if self.start == self.end or self.start.tzinfo is not None or self.end.tzinfo is not None:
            raise InvalidInput(
                "Quiet hours are from one local time to another.", code="QUIET_HOURS_INVALID", fix="21:00 to 08:00."
            )

    def over_at(self, at: datetime, where: Zone) -> datetime | None:
        """If it is quiet there at this aware instant, the one at which it no longer is; else None.

        An end that the clock skips is where the gap ends; of one that it repeats, each ends what was quiet before it.
        """
        local = where.local(at).time()
        within = self.start <= local < self.end if self.start < self.end else local >= self.start or local < self.end
        if not within:
            return None
        day = _second(at) + where.offset(_second(at))
        midnight = day - day % DAY_S
        end = self.end.hour * 3600 + self.end.minute * 60 + self.end.second
        found = (
            second
            for days in range(3)
            for second in _instants(where, midnight + days * DAY_S + end)
            if _EPOCH + timedelta(seconds=second) > at
        )
        return _EPOCH + timedelta(seconds=next(found))


@dataclass(frozen=True, slots=True)
class Throttle:
    """`size` recipients a chunk, and at least `apart` between the starts of two.

    Raises InvalidInput (THROTTLE_INVALID).
    """

    size: int = 500
    apart: timedelta = timedelta(seconds=2)

    def __post_init__(self) -> None:
        if not 1 <= self.size <= 500 or self.apart < timedelta(0):
            raise InvalidInput(
                "A chunk has 1 to 500 recipients, and chunks are not less than 0 s apart.", code="THROTTLE_INVALID",
                fix="chunkSize 500 and chunkDelayMs 2000 are the defaults.",
            )  # fmt: skip


class LeftOut(StrEnum):
    """Why somebody is not sent to at all."""

    FILTERS = "filters"
    """Does not fit what is asked for besides consent."""
    PUSH_OFF = "pushOff"
    """Fits, and wants no pushes."""
    MARKETING_OFF = "marketingOff"
    """Fits, and did not consent to marketing."""
    NO_TOKEN = "noToken"  # noqa: S105 - not one
    """A row of the audience without a token."""
    QUIET = "quiet"
    """Would have been woken."""
    EXPIRED = "expired"
    """Would have got it after the end."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Recipients `first` to `first + size - 1` of a zone, in the audience's order, at an aware UTC instant."""

    at: datetime
    zone: str
    first: int
    size: int


@dataclass(slots=True)
class Timetable:
    """When everybody is sent to, in the order of time, and who is left out: (zone, why) and how many."""

    chunks: list[Chunk] = field(default_factory=list)
    left_out: dict[tuple[str, LeftOut], int] = field(default_factory=dict)

    def per_zone(self) -> Iterator[tuple[str, datetime, datetime, int]]:
        """Of each zone: the first chunk's instant, the last one's, and how many recipients; by the first."""
        found: dict[str, tuple[datetime, datetime, int]] = {}
        for chunk in self.chunks:
            first, _, size = found.get(chunk.zone, (chunk.at, chunk.at, 0))
            found[chunk.zone] = first, chunk.at, size + chunk.size
        yield from ((zone, *each) for zone, each in found.items())


def timetable(
    audience: Mapping[Zone, int],
    when: datetime,
    *,
    now: datetime,
    quiet: QuietHours | None = None,
    throttle: Throttle | None = None,
    until: datetime | None = None,
) -> Timetable:
    """When each chunk is sent, by the rules of this module. `audience`: how many recipients in each zone.

    `when` is an aware instant, or naive: a local time where each recipient is. Nothing is before `now` (aware): where
    a local time is past already, it is sent as soon as the rest allows. `until` (aware) is the last instant to send.
    """
    throttle = throttle or Throttle()
    plan = Timetable()
    waiting: list[tuple[datetime, str, int]] = []
    zones = {where.name: where for where in audience}
    left = {where.name: count for where, count in audience.items() if count > 0}
    for name in sorted(left):
        at = when if when.tzinfo is not None else resolve_local(when, zones[name])[0]
        heapq.heappush(waiting, (max(at.astimezone(UTC), now.astimezone(UTC)), name, 0))
    free = now.astimezone(UTC)
    while waiting:
        due, name, first = heapq.heappop(waiting)
        at = max(due, free)
        rest = left[name] - first
        over = None if quiet is None else quiet.over_at(at, zones[name])
        if over is not None and quiet is not None and quiet.then is InQuiet.SKIP:
            plan.left_out[name, LeftOut.QUIET] = rest
        elif over is not None:
            heapq.heappush(waiting, (over, name, first))
        elif until is not None and at > until:
            plan.left_out[name, LeftOut.EXPIRED] = rest
        else:
            size = min(throttle.size, rest)
            plan.chunks.append(Chunk(at, name, first, size))
            free = at + throttle.apart
            if rest > size:
                heapq.heappush(waiting, (due, name, first + size))
    return plan


def _second(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(seconds=1)


def _instants(where: Zone, local: int) -> tuple[int, ...]:
    """When clocks there show a local second; where they skip it, the end of the gap."""
    return where.instants(local) or ((end,) if (end := where.gap_end(local)) is not None else ())
