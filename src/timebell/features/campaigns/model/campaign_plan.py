"""The plan of a campaign (content, audience, pace) and its progress through the zones. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, time, timedelta
from difflib import get_close_matches
from typing import Any

from timebell.errors import InvalidInput
from timebell.features.campaigns.model import personalization
from timebell.features.campaigns.model.campaign import (
    CampaignState,
    ExclusionReason,
    QuietHours,
    QuietHoursPolicy,
    RecipientCounts,
)
from timebell.features.campaigns.model.experiment import Experiment, parse_experiment
from timebell.features.campaigns.model.filters import Filters
from timebell.features.campaigns.model.health import Health
from timebell.model import mapping
from timebell.model.mapping import FieldMapping
from timebell.recurrence import Zone, resolve_local, zone

NOTIFICATION_ID_ROOTS = frozenset({"campaignId", "scheduleId", "deviceId", "userId"})
"""Placeholders that a notification id may contain."""
MAX_OPEN_CHUNKS = 8
"""Chunks sent concurrently: enough to keep the provider busy, few enough to stop soon."""
ADAPTIVE = "adaptive"
EARLIEST_ZONE = "Etc/GMT-14"
"""The zone in which every local time comes first, UTC+14."""
EARLIEST_OFFSET = timedelta(hours=14)
APPEARANCE_OPTIONS = (
    "image", "sound", "badge", "priority", "channel", "link", "actions", "analyticsLabel", "android", "apns", "webpush",
)  # fmt: skip
_CONTENT_FIELDS = ("title", "body", "data", "rename", "ttl", "translations", "appearance")
OPTION_NAMES = (
    "title", "body", "data", "fields", "ttl", "collapseKey", "notificationId", "filters", "marketing", "chunkSize",
    "chunkDelayMs", "quietHours", "localTime", "expiresAt", "unknown", "canary", "maxRecipients", "maxChange",
    "approveAbove", "audienceFormat", "contentType", "maxErrorRate", "translations", "notify", "variants", "holdOut",
    "trackOpens", *APPEARANCE_OPTIONS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Canary:
    """Stop after the first `size` recipients if more than `max_error_rate` (0 to 1) of them failed."""

    size: int
    max_error_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignPlan:
    """Content, audience and pace of a campaign.

    `ttl` is in seconds. `chunk_delay` is the interval between the starts of two chunks; None: as fast as the provider
    accepts them. `local_time` is naive and applies in each recipient's zone. `max_change` is the allowed change of the
    audience size, as a fraction of the size of the previous campaign of the same name.
    """

    title: str | None = None
    body: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    rename: Mapping[str, str] = field(default_factory=dict)
    ttl: int | None = None
    collapse_key: str | None = None
    notification_id: str | None = None
    filters: Filters = field(default_factory=Filters)
    marketing: bool = False
    chunk_size: int = 500
    chunk_delay: timedelta | None = timedelta(seconds=2)
    quiet_hours: QuietHours | None = None
    local_time: datetime | None = None
    expires_at: datetime | None = None
    leave_unknown: bool = True
    canary: Canary | None = None
    max_recipients: int | None = None
    max_change: float | None = None
    approve_above: int | None = None
    audience_pinned: bool = False
    """Select the recipients when the campaign is created, not when it starts; consent is checked when sending."""
    max_error_rate: float = 0.25
    """Pause if more than this share of the recent messages was refused, apart from dead tokens; 1: never."""
    translations: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Title and body by language tag, for recipients with that language."""
    appearance: Mapping[str, Any] = field(default_factory=dict)
    """Options of push/appearance.py, which checks them."""
    experiment: Experiment = field(default_factory=Experiment)
    track_opens: bool = False
    """Send the id of the campaign to the app, so that it can report that the message was opened."""
    notify: str | None = None
    """The named target that receives the start, pauses, resumptions and the end."""
    content_live: bool = False
    """The message may be edited during sending; chunks already sent keep the old message."""

    @classmethod
    def from_json(cls, options: Mapping[str, Any]) -> CampaignPlan:
        """Parse the JSON form that `to_json` returns.

        Raises InvalidInput (INVALID_CAMPAIGN, INVALID_FILTER, CONSENT_FILTER_MISSING, INVALID_QUIET_HOURS,
        INVALID_TEMPLATE, ...).
        """
        for name in options:
            if name not in OPTION_NAMES:
                near = get_close_matches(str(name), OPTION_NAMES, 1)
                raise _invalid(f"A campaign has no option {name!r:.60}", f"Did you mean {near[0]}?" if near else "")
        values = {name: value for name, value in options.items() if value is not None}
        plan = cls(
            title=_text(values, "title"), body=_text(values, "body"), data=_object(values, "data"),
            rename=_field_names(values), ttl=_integer(values, "ttl", 0, 28 * 86_400),
            collapse_key=_text(values, "collapseKey"), notification_id=_text(values, "notificationId"),
            filters=Filters.from_json(values.get("filters")), marketing=_flag(values, "marketing"),
            chunk_size=_integer(values, "chunkSize", 1, 500) or 500, chunk_delay=_chunk_delay(values),
            quiet_hours=_quiet_hours(values), local_time=_local_time(values), expires_at=_expiry(values),
            leave_unknown=_one_of(values, "unknown", ("leave", "retry")) != "retry", canary=_canary(values),
            max_recipients=_integer(values, "maxRecipients", 1, 10**12),
            max_change=_fraction(values, "maxChange", 1000.0),
            approve_above=_integer(values, "approveAbove", 0, 10**12),
            audience_pinned=_one_of(values, "audienceFormat", ("live", "pinned")) == "pinned",
            max_error_rate=0.25 if (rate := _fraction(values, "maxErrorRate", 1.0)) is None else rate,
            translations=_translations(values),
            appearance={name: values[name] for name in APPEARANCE_OPTIONS if name in values},
            experiment=_experiment(values), track_opens=_flag(values, "trackOpens"), notify=_text(values, "notify"),
            content_live=_one_of(values, "contentType", ("live", "pinned")) == "live",
        )  # fmt: skip
        personalization.check_placeholders([*plan.texts, *plan.variant_texts])
        if plan.notification_id is not None:
            mapping.check_template({"notificationId": plan.notification_id}, NOTIFICATION_ID_ROOTS)
        if plan.marketing and not plan.filters.marketing_on:
            raise InvalidInput(
                "A marketing campaign must filter by consent to marketing.", code="CONSENT_FILTER_MISSING",
                fix='Add "marketingOnOff": true to filters, or remove "marketing" if the campaign is not marketing.',
            )  # fmt: skip
        return plan

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form with defaults filled in; options that are not set are omitted."""
        options: dict[str, Any] = {
            "title": self.title, "body": self.body, "data": dict(self.data),
            "fields": {"rename": dict(self.rename)} if self.rename else None, "ttl": self.ttl,
            "collapseKey": self.collapse_key, "notificationId": self.notification_id, "filters": self.filters.to_json(),
            "marketing": self.marketing or None, "chunkSize": self.chunk_size,
            "chunkDelayMs": ADAPTIVE if self.chunk_delay is None else self.chunk_delay // timedelta(milliseconds=1),
            "quietHours": None if self.quiet_hours is None else {
                "start": self.quiet_hours.start.isoformat("minutes"), "end": self.quiet_hours.end.isoformat("minutes"),
                "then": self.quiet_hours.policy.value,
            },
            "localTime": None if self.local_time is None else self.local_time.isoformat(),
            "expiresAt": None if self.expires_at is None else self.expires_at.isoformat().replace("+00:00", "Z"),
            "unknown": "leave" if self.leave_unknown else "retry",
            "canary": None if self.canary is None
            else {"size": self.canary.size, "maxErrorRate": self.canary.max_error_rate},
            "maxRecipients": self.max_recipients, "maxChange": self.max_change, "approveAbove": self.approve_above,
            "audienceFormat": "pinned" if self.audience_pinned else None,
            "contentType": "live" if self.content_live else None,
            "variants": [variant.to_json() for variant in self.experiment.variants] or None,
            "holdOut": self.experiment.hold_out or None, "trackOpens": self.track_opens or None,
            "notify": self.notify, "maxErrorRate": self.max_error_rate,
            "translations": self.translations or None, **self.appearance,
        }  # fmt: skip
        return {name: value for name, value in options.items() if value is not None}

    def with_content_from(self, other: CampaignPlan) -> CampaignPlan:
        """Return this plan with the content of another."""
        return replace(self, **{name: getattr(other, name) for name in _CONTENT_FIELDS})

    @property
    def texts(self) -> list[Any]:
        """The parts of the message that may have placeholders."""
        return [self.title, self.body, dict(self.data), dict(self.translations), dict(self.appearance)]

    @property
    def is_personal(self) -> bool:
        """True if texts depend on values of the recipient."""
        has_languages = any("translations" in texts for texts in self.variant_texts)
        return (
            bool(self.translations)
            or has_languages
            or personalization.has_placeholders([*self.texts, *self.variant_texts])
        )

    @property
    def variant_texts(self) -> list[Any]:
        """The texts of the variants."""
        return [dict(variant.texts) for variant in self.experiment.variants]

    def for_variant(self, name: str | None) -> CampaignPlan:
        """Return the plan with the texts of a variant; None: unchanged."""
        for variant in self.experiment.variants:
            if variant.name == name:
                texts = dict(variant.texts)
                image = {"image": texts.pop("image")} if "image" in texts else {}
                return replace(self, appearance={**self.appearance, **image}, **texts)
        return self

    def personalize(self, values: Mapping[str, Any]) -> CampaignPlan:
        """Return the plan with the texts of one recipient; `values` are those of the placeholders."""
        chosen = personalization.choose_language(self.translations, values.get("language"))
        title, body, data, _, appearance = personalization.render(
            [chosen.get("title", self.title), chosen.get("body", self.body), *self.texts[2:]], values
        )
        return replace(self, title=title, body=body, data=data, appearance=appearance)

    @property
    def is_zone_dependent(self) -> bool:
        """True if the send time depends on the recipient's zone."""
        return self.local_time is not None or self.quiet_hours is not None

    @property
    def requires_size_check(self) -> bool:
        """True if the audience must be counted before the first chunk."""
        return any(limit is not None for limit in (self.max_recipients, self.max_change, self.approve_above))

    def data_strings(self) -> dict[str, str]:
        """Return `data` as sent to the device: strings under renamed fields. Raises InvalidPayload (INVALID_BODY)."""
        strings: dict[str, str] = FieldMapping(self.rename, strings=True).apply(self.data)
        return strings

    def notification_id_for(
        self, campaign_id: str, schedule_id: str | None, device_id: str, user_id: str | None
    ) -> str:
        """Return the notification id for one recipient. Raises InvalidPayload (INVALID_BODY)."""
        if self.notification_id is None:
            return campaign_id
        values = {"campaignId": campaign_id, "scheduleId": schedule_id or campaign_id, "deviceId": device_id,
                 "userId": user_id or device_id}  # fmt: skip
        return str(mapping.fill_template({"id": self.notification_id}, values)["id"])


@dataclass(slots=True)
class ZoneProgress:
    """Progress through the recipients of one zone (`zone` None: of all zones).

    `cursor` is the last recipient read. `of` is `devices`; or `ledger` in a retry, which reads the recorded chunks
    before chunk `until` for recipients in `states`.
    """

    zone: str | None
    at: datetime
    cursor: str = ""
    done: bool = False
    of: str = "devices"
    until: int = 0
    states: Sequence[str] = ()
    why: ExclusionReason | None = None
    """The reason why the remaining recipients were excluded, if the zone ended before all were sent to."""

    def to_json(self) -> dict[str, Any]:
        """Return the stored JSON form."""
        return {
            "zone": self.zone, "at": self.at.isoformat(), "cursor": self.cursor, "done": self.done, "of": self.of,
            "until": self.until, "states": list(self.states), "why": None if self.why is None else self.why.value,
        }  # fmt: skip

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> ZoneProgress:
        """Parse the stored JSON form."""
        why = stored.get("why")
        return cls(
            **{
                **stored,
                "at": datetime.fromisoformat(stored["at"]),
                "why": None if why is None else ExclusionReason(why),
            }
        )


def plan_zones(
    plan: CampaignPlan, at: datetime, default_timezone: str, zones: Sequence[str | None]
) -> list[ZoneProgress]:
    """Return the initial progress: one entry for all recipients, or one per zone if send times depend on the zone.

    `default_timezone` is the zone of recipients whose zone is unknown.
    """
    if not plan.is_zone_dependent:
        return [ZoneProgress(None, at)]
    names = sorted({name or default_timezone for name in zones})
    return [
        ZoneProgress(name, at if plan.local_time is None else resolve_local(plan.local_time, zone(name))[0])
        for name in names
    ]


def earliest_send_at(plan: CampaignPlan, at: datetime) -> datetime:
    """Return the earliest instant at which a recipient may be due: local times are at most 14 hours ahead of UTC."""
    return at if plan.local_time is None else plan.local_time.replace(tzinfo=UTC) - EARLIEST_OFFSET


def plan_for_occurrence(plan: CampaignPlan, scheduled_at: datetime, timezone: str) -> tuple[CampaignPlan, datetime]:
    """Return the plan and the send time of an occurrence in EARLIEST_ZONE, whose time applies in each zone.

    `timezone` is the zone of recipients whose zone is unknown.
    """
    local_time = scheduled_at.astimezone(UTC).replace(tzinfo=None) + EARLIEST_OFFSET
    return replace(plan, local_time=local_time), resolve_local(local_time, zone(timezone))[0]


def next_zone(zones: Sequence[ZoneProgress], plan: CampaignPlan, now: datetime) -> tuple[ZoneProgress | None, datetime]:
    """Return the zone to send to next and the instant; (None, now) if all zones are done.

    Zones that can no longer be sent to are marked as done, with the reason.
    """
    earliest: tuple[datetime, int] | None = None
    for n, progress in enumerate(zones):
        if progress.done:
            continue
        at = max(progress.at, now)
        if plan.quiet_hours is not None and progress.zone is not None:
            quiet_until = plan.quiet_hours.quiet_until(at, zone(progress.zone))
            if quiet_until is not None and plan.quiet_hours.policy is QuietHoursPolicy.SKIP:
                progress.done, progress.why = True, ExclusionReason.QUIET
                continue
            at = quiet_until or at
        if plan.expires_at is not None and at > plan.expires_at:
            progress.done, progress.why = True, ExclusionReason.EXPIRED
            continue
        if earliest is None or at < earliest[0]:
            earliest = at, n
    return (None, now) if earliest is None else (zones[earliest[1]], earliest[0])


def pinned_audience(campaign_id: str) -> str:
    """Return the name of the audience that stores a campaign's pinned recipients; users cannot create such a name."""
    return f"@{campaign_id}"


def zone_or_default(name: str | None, default_timezone: str) -> Zone:
    """Return the zone of a recipient, or the default zone if it is unknown."""
    return zone(name or default_timezone)


@dataclass(slots=True, kw_only=True)
class Campaign:
    """A campaign and its progress. Instants are aware UTC.

    `opened` recipients are in chunks that were opened; `unsent` ones were attempted and may be attempted again.
    """

    id: str
    tenant_id: str
    plan: CampaignPlan
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
    zone_progress: list[ZoneProgress] = field(default_factory=list)
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
    excluded: dict[str, int] = field(default_factory=dict)
    """Numbers of recipients excluded so far, by ExclusionReason."""
    pinned_at: datetime | None = None
    registered: int | None = None
    """Devices that were registered when the campaign started."""
    all_opened: bool = False
    """True once every recipient is in an opened chunk or excluded, and `excluded` is exact."""
    possible_duplicates: int = 0
    health: Health = field(default_factory=Health)
    archived_at: datetime | None = None
    deleted_at: datetime | None = None
    stored_phase: str | None = field(default=None, compare=False)
    """The phase in the database; None for a new campaign."""

    @property
    def phase(self) -> str:
        """The part of its life that a campaign is in: pending, running, paused or ended."""
        if self.state in (CampaignState.PENDING, CampaignState.PAUSED):
            return self.state.value
        is_ended = self.state is not CampaignState.RUNNING and not self.open_chunks
        return "ended" if is_ended else "running"

    @property
    def experiment_seed(self) -> str:
        """The seed of the choice of variants: the same for all occurrences of a recurring campaign."""
        return self.schedule_id or self.id

    @property
    def filters(self) -> Filters:
        """The plan's filters; once the audience is pinned, its pinned recipients that still consent."""
        planned = self.plan.filters
        if self.pinned_at is None:
            return planned
        return Filters(
            push_on=planned.push_on, marketing_on=planned.marketing_on, frequency_cap=planned.frequency_cap,
            audience=(pinned_audience(self.id),),
        )  # fmt: skip

    @property
    def reference_time(self) -> datetime:
        """The instant to which ages and days in filters refer: the start of the campaign, or when it is due."""
        return self.cutoff or self.send_at

    @property
    def notification_pattern(self) -> str:
        """The template of the notification ids, or the campaign's id if all recipients get the same notification."""
        return self.plan.notification_id or self.id

    def exclude(self, reason: ExclusionReason, count: int) -> None:
        """Count `count` excluded recipients."""
        if count:
            self.excluded[reason.value] = self.excluded.get(reason.value, 0) + count

    @property
    def all_chunks_opened(self) -> bool:
        """True once no job is needed to open more chunks."""
        return self.all_opened and all(progress.done for progress in self.zone_progress)

    def final_state(self) -> CampaignState:
        """Return the state in which the campaign ends, by its results."""
        if self.opened and not self.accepted:
            return CampaignState.FAILED
        return CampaignState.PARTLY_SENT if self.unknown + self.unsent else CampaignState.COMPLETED

    def counts(self) -> RecipientCounts:
        """Return the counts of the recipients in opened chunks."""
        ended = self.accepted + self.refused + self.unknown + self.unsent
        return RecipientCounts(self.opened - ended, self.accepted, self.refused, self.unknown, self.unsent)


def _text(options: Mapping[str, Any], name: str) -> str | None:
    value = options.get(name)
    if value is not None and (not isinstance(value, str) or "\0" in value or not value):
        raise _invalid(f"{name} is {value!r:.60}, not a non-empty string")
    return value


def _flag(options: Mapping[str, Any], name: str) -> bool:
    value = options.get(name, False)
    if not isinstance(value, bool):
        raise _invalid(f"{name} is {value!r:.60}; use true or false")
    return value


def _one_of(options: Mapping[str, Any], name: str, choices: Sequence[str]) -> str | None:
    value = options.get(name)
    if value is not None and value not in choices:
        raise _invalid(f"{name} is {value!r:.60}; use one of {', '.join(choices)}")
    return value


def _object(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = options.get(name, {})
    if not isinstance(value, Mapping):
        raise _invalid(f"{name} is {value!r:.60}, not an object")
    return dict(value)


def _field_names(options: Mapping[str, Any]) -> dict[str, str]:
    value = _object(options, "fields")
    rename = value.get("rename", {})
    if value.keys() - {"rename"} or not isinstance(rename, Mapping):
        raise _invalid('fields must be like {"rename": {"bible_code": "bibleCode"}}')
    if not all(isinstance(new, str) and new for new in rename.values()) or len(set(rename.values())) < len(rename):
        raise _invalid("fields.rename maps two fields to the same name, or one to no name")
    return dict(rename)


def _integer(options: Mapping[str, Any], name: str, minimum: int, maximum: int) -> int | None:
    value = options.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum):
        raise _invalid(f"{name} is {value!r:.60}; it must be an integer from {minimum:,} to {maximum:,}")
    return value


def _fraction(options: Mapping[str, Any], name: str, maximum: float) -> float | None:
    value = options.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= maximum:
        raise _invalid(f"{name} is {value!r:.60}; it must be a fraction such as 0.2, at most {maximum:g}")
    return float(value)


def _chunk_delay(options: Mapping[str, Any]) -> timedelta | None:
    if options.get("chunkDelayMs") == ADAPTIVE:
        return None
    milliseconds = _integer(options, "chunkDelayMs", 0, 86_400_000)
    return timedelta(milliseconds=2000 if milliseconds is None else milliseconds)


def _quiet_hours(options: Mapping[str, Any]) -> QuietHours | None:
    value = _object(options, "quietHours")
    if not value:
        return None
    try:
        start, end = time.fromisoformat(value["start"]), time.fromisoformat(value["end"])
        policy = QuietHoursPolicy(value.get("then", "wait"))
    except (KeyError, TypeError, ValueError):
        raise _invalid('quietHours must be {"start": "21:00", "end": "08:00", "then": "wait" or "skip"}') from None
    if any(each.second or each.microsecond for each in (start, end)):  # stored with minute resolution
        raise _invalid("quietHours must be whole minutes")
    return QuietHours(start, end, policy)


def _local_time(options: Mapping[str, Any]) -> datetime | None:
    value = options.get("localTime")
    if value is None:
        return None
    try:
        local = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        local = None
    if local is None or local.tzinfo is not None:
        raise _invalid(f"localTime is {value!r:.60}, not a local time such as 2027-03-01T09:00")
    return local


def _expiry(options: Mapping[str, Any]) -> datetime | None:
    value = options.get("expiresAt")
    if value is None:
        return None
    try:
        parsed = datetime.fromisoformat(value)
        expires_at = None if parsed.tzinfo is None else parsed.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        expires_at = None
    if expires_at is None:
        raise _invalid(f"expiresAt is {value!r:.60}, not an instant such as 2027-03-01T12:00:00Z")
    return expires_at


def _translations(options: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    value = _object(options, "translations")
    for language, texts in value.items():
        if not isinstance(texts, Mapping) or texts.keys() - {"title", "body"} or not texts:
            raise _invalid(f'translations.{language!s:.20} must be like {{"title": "...", "body": "..."}}')
        for name in texts:
            _text(texts, name)
    return {str(language): dict(texts) for language, texts in value.items()}


def _experiment(options: Mapping[str, Any]) -> Experiment:
    experiment = parse_experiment(options.get("variants"), options.get("holdOut"))
    for variant in experiment.variants:
        for name in ("title", "body", "image"):
            _text(variant.texts, name)
        _object(variant.texts, "data")
        _translations(variant.texts)
    return experiment


def _canary(options: Mapping[str, Any]) -> Canary | None:
    value = _object(options, "canary")
    if not value:
        return None
    size, rate = _integer(value, "size", 1, 10**9), _fraction(value, "maxErrorRate", 1.0)
    if value.keys() - {"size", "maxErrorRate"} or size is None or rate is None:
        raise _invalid('canary must be like {"size": 1000, "maxErrorRate": 0.05}')
    return Canary(size, rate)


def _invalid(problem: str, fix: str = "") -> InvalidInput:
    return InvalidInput(f"{problem}.", code="INVALID_CAMPAIGN", fix=fix or "See docs/guides/campaigns.md.")
