"""The plan of a campaign (content, audience, pace) and its progress through the zones. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import Any

from timebell.errors import InvalidInput
from timebell.features.campaigns.model import personalization, plan_options
from timebell.features.campaigns.model.campaign import (
    CampaignState,
    ExclusionReason,
    QuietHours,
    QuietHoursPolicy,
    RecipientCounts,
)
from timebell.features.campaigns.model.experiment import Experiment
from timebell.features.campaigns.model.filters import Filters
from timebell.features.campaigns.model.health import Health
from timebell.model import mapping
from timebell.model.mapping import FieldMapping
from timebell.recurrence import Zone, resolve_local, zone

NOTIFICATION_ID_ROOTS = frozenset({"campaignId", "scheduleId", "deviceId", "userId"})
"""Placeholders that a notification id may contain."""
MAX_OPEN_CHUNKS = 8
"""Chunks sent concurrently: enough to keep the provider busy, few enough to stop soon."""
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
    canary: plan_options.Canary | None = None
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
                raise plan_options.invalid_campaign(
                    f"A campaign has no option {name!r:.60}", f"Did you mean {near[0]}?" if near else ""
                )
        values = {name: value for name, value in options.items() if value is not None}
        plan = cls(
            title=plan_options.parse_text(values, "title"),
            body=plan_options.parse_text(values, "body"),
            data=plan_options.parse_object(values, "data"),
            rename=plan_options.parse_field_names(values),
            ttl=plan_options.parse_integer(values, "ttl", 0, 28 * 86_400),
            collapse_key=plan_options.parse_text(values, "collapseKey"),
            notification_id=plan_options.parse_text(values, "notificationId"),
            filters=Filters.from_json(values.get("filters")),
            marketing=plan_options.parse_flag(values, "marketing"),
            chunk_size=plan_options.parse_integer(values, "chunkSize", 1, 500) or 500,
            chunk_delay=plan_options.parse_chunk_delay(values),
            quiet_hours=plan_options.parse_quiet_hours(values),
            local_time=plan_options.parse_local_time(values),
            expires_at=plan_options.parse_expiry(values),
            leave_unknown=plan_options.parse_one_of(values, "unknown", ("leave", "retry")) != "retry",
            canary=plan_options.parse_canary(values),
            max_recipients=plan_options.parse_integer(values, "maxRecipients", 1, 10**12),
            max_change=plan_options.parse_fraction(values, "maxChange", 1000.0),
            approve_above=plan_options.parse_integer(values, "approveAbove", 0, 10**12),
            audience_pinned=plan_options.parse_one_of(values, "audienceFormat", ("live", "pinned")) == "pinned",
            max_error_rate=0.25 if (rate := plan_options.parse_fraction(values, "maxErrorRate", 1.0)) is None else rate,
            translations=plan_options.parse_translations(values),
            appearance={name: values[name] for name in APPEARANCE_OPTIONS if name in values},
            experiment=plan_options.parse_experiment_options(values),
            track_opens=plan_options.parse_flag(values, "trackOpens"),
            notify=plan_options.parse_text(values, "notify"),
            content_live=plan_options.parse_one_of(values, "contentType", ("live", "pinned")) == "live",
        )
        plan._check()
        return plan

    def _check(self) -> None:
        """Check what several options depend on. Raises InvalidInput."""
        personalization.check_placeholders([*self.texts, *self.variant_texts])
        if self.notification_id is not None:
            mapping.check_template({"notificationId": self.notification_id}, NOTIFICATION_ID_ROOTS)
        if self.marketing and not self.filters.marketing_on:
            raise InvalidInput(
                "A marketing campaign must filter by consent to marketing.", code="CONSENT_FILTER_MISSING",
                fix='Add "marketingOnOff": true to filters, or remove "marketing" if the campaign is not marketing.',
            )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form with defaults filled in; options that are not set are omitted."""
        options: dict[str, Any] = {
            "title": self.title, "body": self.body, "data": dict(self.data),
            "fields": {"rename": dict(self.rename)} if self.rename else None, "ttl": self.ttl,
            "collapseKey": self.collapse_key, "notificationId": self.notification_id, "filters": self.filters.to_json(),
            "marketing": self.marketing or None, "chunkSize": self.chunk_size,
            "chunkDelayMs": plan_options.ADAPTIVE if self.chunk_delay is None
            else self.chunk_delay // timedelta(milliseconds=1),
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
