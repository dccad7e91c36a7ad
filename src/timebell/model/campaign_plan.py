"""What a campaign sends, to whom and how fast; and how its walk goes from zone to zone. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, time, timedelta
from difflib import get_close_matches
from typing import Any

from timebell.errors import InvalidInput
from timebell.model import mapping
from timebell.model.audience import Filters
from timebell.model.campaign import CampaignState, Counts, InQuiet, LeftOut, QuietHours
from timebell.model.mapping import Fields
from timebell.recurrence import Zone, resolve_local, zone

ROOTS = frozenset({"campaignId", "scheduleId", "deviceId", "userId"})
"""What a notification id may be made of."""
MOST_OPEN = 8
"""Chunks under way at once: enough to keep the provider busy, few enough to stop soon."""
ADAPTIVE = "adaptive"
_CONTENT = ("title", "body", "data", "rename", "ttl")
OPTIONS = (
    "title", "body", "data", "fields", "ttl", "collapseKey", "notificationId", "filters", "marketing", "chunkSize",
    "chunkDelayMs", "quietHours", "localTime", "expiresAt", "unknown", "canary", "maxRecipients", "maxChange",
    "approveAbove", "audienceAs", "contentAs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Canary:
    """After the first `size` recipients it goes on only if at most `max_error_rate` (0 to 1) of them failed."""

    size: int
    max_error_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """`delay` is between the starts of two chunks, None: as fast as the provider takes them. `local`: a local time
    where each recipient is. `max_change` is a share of what the last campaign of the same name reached."""

    title: str | None = None
    body: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    rename: Mapping[str, str] = field(default_factory=dict)
    ttl: int | None = None
    collapse_key: str | None = None
    notification_id: str | None = None
    filters: Filters = field(default_factory=Filters)
    marketing: bool = False
    size: int = 500
    delay: timedelta | None = timedelta(seconds=2)
    quiet: QuietHours | None = None
    local: datetime | None = None
    expires_at: datetime | None = None
    leave_unknown: bool = True
    canary: Canary | None = None
    max_recipients: int | None = None
    max_change: float | None = None
    approve_above: int | None = None
    pinned: bool = False
    """Who gets it is decided when the campaign is made, not when it starts; consent counts as it is when it is sent."""
    content_live: bool = False
    """The message may be changed while it is sent; who was sent to has it as it was."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Sending:
        """From JSON, as `json` writes it. Raises InvalidInput (CAMPAIGN_INVALID, FILTER_INVALID,
        CONSENT_FILTER_MISSING, QUIET_HOURS_INVALID, TEMPLATE_INVALID, ...)."""
        for name in given:
            if name not in OPTIONS:
                near = get_close_matches(str(name), OPTIONS, 1)
                raise _unfit(f"A campaign has no {name!r:.60}", f"Did you mean {near[0]}?" if near else "")
        said = {name: value for name, value in given.items() if value is not None}
        found = cls(
            title=_text(said, "title"), body=_text(said, "body"), data=_object(said, "data"), rename=_rename(said),
            ttl=_whole(said, "ttl", 0, 28 * 86_400), collapse_key=_text(said, "collapseKey"),
            notification_id=_text(said, "notificationId"), filters=Filters.read(said.get("filters")),
            marketing=_flag(said, "marketing"), size=_whole(said, "chunkSize", 1, 500) or 500, delay=_delay(said),
            quiet=_quiet(said), local=_local(said), expires_at=_instant(said),
            leave_unknown=_one_of(said, "unknown", ("leave", "retry")) != "retry", canary=_canary(said),
            max_recipients=_whole(said, "maxRecipients", 1, 10**12), max_change=_share(said, "maxChange", 1000.0),
            approve_above=_whole(said, "approveAbove", 0, 10**12),
            pinned=_one_of(said, "audienceAs", ("live", "pinned")) == "pinned",
            content_live=_one_of(said, "contentAs", ("live", "pinned")) == "live",
        )  # fmt: skip
        if found.notification_id is not None:
            mapping.check({"notificationId": found.notification_id}, ROOTS)
        if found.marketing and not found.filters.marketing_on:
            raise InvalidInput(
                "It is marketing, and its filters do not ask for consent to that.", code="CONSENT_FILTER_MISSING",
                fix='Add "marketingOnOff": true to filters, or leave marketing out if it is none.',
            )  # fmt: skip
        return found

    def json(self) -> dict[str, Any]:
        """All of it, defaults filled in; what is not set is left out."""
        said: dict[str, Any] = {
            "title": self.title, "body": self.body, "data": dict(self.data),
            "fields": {"rename": dict(self.rename)} if self.rename else None, "ttl": self.ttl,
            "collapseKey": self.collapse_key, "notificationId": self.notification_id, "filters": self.filters.json(),
            "marketing": self.marketing or None, "chunkSize": self.size,
            "chunkDelayMs": ADAPTIVE if self.delay is None else self.delay // timedelta(milliseconds=1),
            "quietHours": None if self.quiet is None else {
                "start": self.quiet.start.isoformat("minutes"), "end": self.quiet.end.isoformat("minutes"),
                "then": self.quiet.then.value,
            },
            "localTime": None if self.local is None else self.local.isoformat(),
            "expiresAt": None if self.expires_at is None else self.expires_at.isoformat().replace("+00:00", "Z"),
            "unknown": "leave" if self.leave_unknown else "retry",
            "canary": None if self.canary is None
            else {"size": self.canary.size, "maxErrorRate": self.canary.max_error_rate},
            "maxRecipients": self.max_recipients, "maxChange": self.max_change, "approveAbove": self.approve_above,
            "audienceAs": "pinned" if self.pinned else None, "contentAs": "live" if self.content_live else None,
        }  # fmt: skip
        return {name: value for name, value in said.items() if value is not None}

    def with_content_of(self, other: Sending) -> Sending:
        """This one, with the message of another."""
        return replace(self, **{name: getattr(other, name) for name in _CONTENT})

    @property
    def by_zone(self) -> bool:
        """Whether it matters where a recipient is."""
        return self.local is not None or self.quiet is not None

    @property
    def gated(self) -> bool:
        """Whether its size has to be known before anything is sent."""
        return any(gate is not None for gate in (self.max_recipients, self.max_change, self.approve_above))

    def texts(self) -> dict[str, str]:
        """`data` as a phone gets it: strings, under the app's names. Raises InvalidPayload (BODY_UNFIT)."""
        strings: dict[str, str] = Fields(self.rename, strings=True).of(self.data)
        return strings

    def notification_of(self, campaign_id: str, schedule_id: str | None, device_id: str, user_id: str | None) -> str:
        """Which notification it is, to one recipient. Raises InvalidPayload (BODY_UNFIT)."""
        if self.notification_id is None:
            return campaign_id
        known = {"campaignId": campaign_id, "scheduleId": schedule_id or campaign_id, "deviceId": device_id,
                 "userId": user_id or device_id}  # fmt: skip
        return str(mapping.fill({"id": self.notification_id}, known)["id"])


@dataclass(slots=True)
class Lane:
    """How far the recipients of a zone were walked (None: of all zones). `of` is `devices`, or `ledger` for those who
    were not reached before: then `until` is the first chunk that is not looked at."""

    zone: str | None
    at: datetime
    cursor: str = ""
    done: bool = False
    of: str = "devices"
    until: int = 0
    states: Sequence[str] = ()
    why: LeftOut | None = None
    """Of one that is done before all were sent to: why they were left out."""

    def json(self) -> dict[str, Any]:
        """As it is kept."""
        return {
            "zone": self.zone, "at": self.at.isoformat(), "cursor": self.cursor, "done": self.done, "of": self.of,
            "until": self.until, "states": list(self.states), "why": None if self.why is None else self.why.value,
        }  # fmt: skip

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Lane:
        """As `json` wrote it."""
        why = given.get("why")
        return cls(**{**given, "at": datetime.fromisoformat(given["at"]), "why": None if why is None else LeftOut(why)})


def lanes(sending: Sending, at: datetime, home: str, zones: Sequence[str | None]) -> list[Lane]:
    """What there is to walk: all at once, or a lane for each zone; `home` is where those are whose zone is unknown."""
    if not sending.by_zone:
        return [Lane(None, at)]
    names = sorted({name or home for name in zones})
    return [Lane(name, at if sending.local is None else resolve_local(sending.local, zone(name))[0]) for name in names]


def earliest(sending: Sending, at: datetime) -> datetime:
    """When somebody may be due first: local times begin 14 hours before those of UTC."""
    return at if sending.local is None else sending.local.replace(tzinfo=UTC) - timedelta(hours=14)


def next_lane(given: Sequence[Lane], sending: Sending, now: datetime) -> tuple[Lane | None, datetime]:
    """Which lane goes next, and when; lanes whose time is over are done by this, their people left out."""
    found: tuple[datetime, int] | None = None
    for n, lane in enumerate(given):
        if lane.done:
            continue
        at = max(lane.at, now)
        if sending.quiet is not None and lane.zone is not None:
            over = sending.quiet.over_at(at, zone(lane.zone))
            if over is not None and sending.quiet.then is InQuiet.SKIP:
                lane.done, lane.why = True, LeftOut.QUIET
                continue
            at = over or at
        if sending.expires_at is not None and at > sending.expires_at:
            lane.done, lane.why = True, LeftOut.EXPIRED
            continue
        if found is None or at < found[0]:
            found = at, n
    return (None, now) if found is None else (given[found[1]], found[0])


def pin_of(campaign_id: str) -> str:
    """The name of the audience that a campaign's recipients are pinned as; no other can have it."""
    return f"@{campaign_id}"


def zone_of(name: str | None, home: str) -> Zone:
    """Where somebody is, as far as it is known."""
    return zone(name or home)


@dataclass(slots=True, kw_only=True)
class Campaign:
    """A campaign and how far it is. Instants are aware UTC; `unsent` were tried and may be tried again."""

    id: str
    tenant_id: str
    sending: Sending
    state: CampaignState
    send_at: datetime
    timezone: str
    created_at: datetime
    updated_at: datetime
    name: str | None = None
    reason: str | None = None
    schedule_id: str | None = None
    job_id: str | None = None
    next_chunk: int = 1
    lanes: list[Lane] = field(default_factory=list)
    cutoff: datetime | None = None
    round: int = 0
    open_chunks: int = 0
    opened: int = 0
    accepted: int = 0
    refused: int = 0
    unknown: int = 0
    unsent: int = 0
    expected: int | None = None
    revision: int = 1
    approved_by: str | None = None
    created_by: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    left_out: dict[str, int] = field(default_factory=dict)
    """How many the walk passed over so far, by LeftOut."""
    pinned_at: datetime | None = None

    @property
    def filters(self) -> Filters:
        """Who gets it: what is asked for, or whom it was pinned to, of those who still consent."""
        asked = self.sending.filters
        if self.pinned_at is None:
            return asked
        return Filters(push_on=asked.push_on, marketing_on=asked.marketing_on, audience=pin_of(self.id))

    @property
    def notification(self) -> str:
        """Which notification it is to all; of one that is another to each, by what pattern."""
        return self.sending.notification_id or self.id

    def leave_out(self, why: LeftOut, count: int) -> None:
        """Count some who were passed over."""
        if count:
            self.left_out[why.value] = self.left_out.get(why.value, 0) + count

    @property
    def walked(self) -> bool:
        """Whether nobody is left to open a chunk for."""
        return self.started_at is not None and all(lane.done for lane in self.lanes)

    def counts(self) -> Counts:
        """Of those it was sent to so far."""
        ended = self.accepted + self.refused + self.unknown + self.unsent
        return Counts(self.opened - ended, self.accepted, self.refused, self.unknown, self.unsent)


def _text(said: Mapping[str, Any], name: str) -> str | None:
    value = said.get(name)
    if value is not None and (not isinstance(value, str) or "\0" in value or not value):
        raise _unfit(f"{name} is {value!r:.60}, and a text is meant")
    return value


def _flag(said: Mapping[str, Any], name: str) -> bool:
    value = said.get(name, False)
    if not isinstance(value, bool):
        raise _unfit(f"{name} is {value!r:.60}, and is true or false")
    return value


def _one_of(said: Mapping[str, Any], name: str, words: Sequence[str]) -> str | None:
    value = said.get(name)
    if value is not None and value not in words:
        raise _unfit(f"{name} is {value!r:.60}, and is one of: {', '.join(words)}")
    return value


def _object(said: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = said.get(name, {})
    if not isinstance(value, Mapping):
        raise _unfit(f"{name} is {value!r:.60}, and is an object")
    return dict(value)


def _rename(said: Mapping[str, Any]) -> dict[str, str]:
    value = _object(said, "fields")
    rename = value.get("rename", {})
    if value.keys() - {"rename"} or not isinstance(rename, Mapping):
        raise _unfit('fields is {"rename": {"bible_code": "bibleCode"}}')
    if not all(isinstance(new, str) and new for new in rename.values()) or len(set(rename.values())) < len(rename):
        raise _unfit("fields.rename gives two fields one name, or one no name")
    return dict(rename)


def _whole(said: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    value = said.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most):
        raise _unfit(f"{name} is {value!r:.60}, and is {least:,} to {most:,}")
    return value


def _share(said: Mapping[str, Any], name: str, most: float) -> float | None:
    value = said.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
        raise _unfit(f"{name} is {value!r:.60}, and is a share: 0.2 is a fifth")
    return float(value)


def _delay(said: Mapping[str, Any]) -> timedelta | None:
    if said.get("chunkDelayMs") == ADAPTIVE:
        return None
    given = _whole(said, "chunkDelayMs", 0, 86_400_000)
    return timedelta(milliseconds=2000 if given is None else given)


def _quiet(said: Mapping[str, Any]) -> QuietHours | None:
    value = _object(said, "quietHours")
    if not value:
        return None
    try:
        start, end = time.fromisoformat(value["start"]), time.fromisoformat(value["end"])
        then = InQuiet(value.get("then", "wait"))
    except (KeyError, TypeError, ValueError):
        raise _unfit('quietHours is {"start": "21:00", "end": "08:00", "then": "wait" or "skip"}') from None
    if any(each.second or each.microsecond for each in (start, end)):  # they are kept to the minute
        raise _unfit("quietHours are to the minute")
    return QuietHours(start, end, then)


def _local(said: Mapping[str, Any]) -> datetime | None:
    value = said.get("localTime")
    if value is None:
        return None
    try:
        found = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        found = None
    if found is None or found.tzinfo is not None:
        raise _unfit(f"localTime is {value!r:.60}, and is a local time: 2027-03-01T09:00")
    return found


def _instant(said: Mapping[str, Any]) -> datetime | None:
    value = said.get("expiresAt")
    if value is None:
        return None
    try:
        found = datetime.fromisoformat(value)
        ends = None if found.tzinfo is None else found.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        ends = None
    if ends is None:
        raise _unfit(f"expiresAt is {value!r:.60}, and is an instant: 2027-03-01T12:00:00Z")
    return ends


def _canary(said: Mapping[str, Any]) -> Canary | None:
    value = _object(said, "canary")
    if not value:
        return None
    size, rate = _whole(value, "size", 1, 10**9), _share(value, "maxErrorRate", 1.0)
    if value.keys() - {"size", "maxErrorRate"} or size is None or rate is None:
        raise _unfit('canary is {"size": 1000, "maxErrorRate": 0.05}')
    return Canary(size, rate)


def _unfit(why: str, fix: str = "") -> InvalidInput:
    return InvalidInput(f"{why}.", code="CAMPAIGN_INVALID", fix=fix or "See docs/guides/campaigns.md.")
