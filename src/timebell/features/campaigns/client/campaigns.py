"""Client operations on campaigns: create, edit, test, start, pause, resume, stop, retry, and list recipients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Unpack
from zoneinfo import ZoneInfo

from timebell.client import datetimes
from timebell.client.job_spec import JobSpec
from timebell.client.jobs import Jobs
from timebell.client.options import ScheduleOptions
from timebell.client.schedules import Schedules
from timebell.client.validation import check_text, parse_uuid
from timebell.clock import Clock
from timebell.errors import InvalidInput
from timebell.features.campaigns.client.devices import device_not_found
from timebell.features.campaigns.engine import content
from timebell.features.campaigns.model.campaign import CampaignState, Timetable, build_timetable
from timebell.features.campaigns.model.campaign import Throttle as _Throttle
from timebell.features.campaigns.model.campaign_plan import EARLIEST_ZONE, Campaign, CampaignPlan, zone_or_default
from timebell.features.campaigns.model.device import Device
from timebell.features.campaigns.model.forecast import Forecast
from timebell.features.campaigns.store import (
    actions,
    campaign_jobs,
    campaigns,
    definitions,
    devices,
    progress,
    recipients,
    results,
)
from timebell.features.campaigns.store.campaigns import no_such_campaign
from timebell.features.campaigns.store.results import VariantResult
from timebell.ids import new_id
from timebell.model import page
from timebell.model.job import NewJob
from timebell.model.page import Page
from timebell.model.routes import InternalTarget
from timebell.model.schedule import Schedule
from timebell.recurrence import Spec, zone, zone_key
from timebell.store.dialects.base import Store

MAX_TEST_DEVICES = 100


class Campaigns:
    """Campaign operations. `ensure_open` opens the store if needed; `jobs` creates the jobs of test messages."""

    def __init__(
        self, store: Store, clock: Clock, ensure_open: Callable[[], Any], jobs: Jobs,
        schedules: Schedules, default_timezone: str | None,
    ) -> None:  # fmt: skip
        self._store = store
        self._clock = clock
        self._ensure_open = ensure_open
        self._jobs = jobs
        self._schedules = schedules
        self._default_timezone = default_timezone

    async def create(
        self, message: Mapping[str, Any], *, send_at: datetime | str | None = None,
        timezone: str | ZoneInfo | None = None, name: str | None = None, tenant_id: str = "default",
        created_by: str | None = None, connection: Any = None,
    ) -> Campaign:  # fmt: skip
        """Create a campaign, sent at `send_at` (None: now; a naive datetime is local time in `timezone`).

        `message` has the camelCase fields of POST /campaigns: title, body, data, filters, chunkSize, chunkDelayMs and
        so on. Raises InvalidInput (INVALID_CAMPAIGN, CONSENT_FILTER_MISSING, INVALID_PUSH_MESSAGE,
        PUSH_MESSAGE_TOO_LARGE, UNKNOWN_TOPIC, ...), InThePast.
        """
        await self._ensure_open()
        now = self._clock.now()
        plan = _parse_message(message)
        at, zone_name = self._resolve_send_at(plan, send_at, timezone, now)
        campaign = Campaign(
            id=new_id(now), tenant_id=check_text(tenant_id, "tenant_id"),
            name=None if name is None else check_text(name, "name"), plan=plan, state=CampaignState.PENDING,
            send_at=at, timezone=zone_name, created_at=now, updated_at=now, created_by=created_by,
        )  # fmt: skip
        await self._run(connection, definitions.create_campaign, campaign)
        return campaign

    async def repeat(
        self, /, message: Mapping[str, Any], recurrence: Spec, *, send_at: Any = None,
        name: str | None = None, in_recipient_zones: bool = False, connection: Any = None,
        **options: Unpack[ScheduleOptions],
    ) -> Schedule:  # fmt: skip
        """Create a schedule whose every occurrence is a campaign to the devices registered at that time.

        With `in_recipient_zones` the times of the recurrence are local times of each recipient, and `timezone` is the
        zone of recipients whose zone is unknown.

        `options` are those of `schedule_repeat` (timezone, catch_up, ...). Raises the errors of `create` and
        `schedule_repeat`.
        """
        await self._ensure_open()
        plan = _parse_message(message)
        if plan.local_time is not None or send_at is not None:
            raise InvalidInput(
                "sendAt and localTime cannot be combined with a recurrence.",
                code="INVALID_CAMPAIGN", fix="Omit sendAt and localTime.",
            )  # fmt: skip
        now = self._clock.now()
        await self._run(connection, definitions.require_audience, options.get("tenant_id", "default"), plan)
        target = InternalTarget(campaign_jobs.TARGET)
        payload: dict[str, Any] = {"campaign": plan.to_json()}
        if in_recipient_zones:  # an occurrence starts when its time comes in the first zone, and walks all zones
            payload["recipientsTimezone"] = zone(zone_key(self._zone_or_default(options.get("timezone")))).name
            options["timezone"] = EARLIEST_ZONE
        name = name or f"campaign {new_id(now)}"
        schedule_options = {**options, "name": name, "payload": payload, "target": target}
        draft = self._schedules.draft(campaign_jobs.TOPIC, recurrence, schedule_options, now)
        return await self._schedules.put(draft, replace=False, connection=connection)

    async def edit(
        self, id: str, change: Mapping[str, Any], *, revision: int | None = None, tenant_id: str = "default",
        connection: Any = None,
    ) -> Campaign:  # fmt: skip
        """Change any fields of POST /campaigns of a campaign that has not started; null resets a field.

        Raises NotFound, Conflict (CAMPAIGN_STATE, CAMPAIGN_CHANGED), and the errors of `create`.
        """
        now = self._clock.now()
        plan_changes = dict(change)
        time_changes = {name: plan_changes.pop(name) for name in ("sendAt", "timezone") if name in plan_changes}
        new_name = plan_changes.pop("name", ...)

        def apply_changes(current: Campaign) -> Campaign:
            plan = _parse_message({**current.plan.to_json(), **plan_changes})
            new = dataclasses.replace(current, plan=plan)
            if time_changes or plan.local_time != current.plan.local_time:
                send_at = time_changes.get("sendAt", None if plan.local_time else current.send_at)
                timezone = time_changes.get("timezone")
                new.send_at, new.timezone = self._resolve_send_at(
                    plan, send_at, current.timezone if timezone is None else timezone, now
                )
            if new_name is not ...:
                new.name = None if new_name is None else check_text(new_name, "name")
            return new

        return await self._run_on_campaign(
            connection, definitions.edit_campaign, tenant_id, id, apply_changes, revision, now
        )

    async def get(self, id: str, *, tenant_id: str = "default", connection: Any = None) -> Campaign:
        """Return a campaign. Raises NotFound (CAMPAIGN_NOT_FOUND)."""
        return await self._run_on_campaign(connection, campaigns.find_campaign, tenant_id, id)

    async def forecast(self, id: str, *, tenant_id: str = "default", connection: Any = None) -> Forecast:
        """Return the speed of a campaign, its expected end, and what it waits for. Raises NotFound."""
        campaign = await self.get(id, tenant_id=tenant_id, connection=connection)
        found: Forecast = await self._run(connection, progress.forecast_campaign, campaign, self._clock.now())
        return found

    async def list(
        self, *, state: str | None = None, archived: bool = False, start: datetime | None = None,
        end: datetime | None = None, tenant_id: str = "default", limit: int = 50, cursor: str | None = None,
        connection: Any = None,
    ) -> Page[Campaign]:  # fmt: skip
        """Return a page of campaigns, newest first: the archived ones, or the others.

        Only campaigns with a send time in [start, end). Raises InvalidInput.
        """
        before = page.validate_paging(limit, cursor)
        parsed_state = None if state is None else _parse_state(state)
        campaign_page: Page[Campaign] = await self._run(
            connection, campaigns.list_campaigns, tenant_id, limit, before, parsed_state, archived, start, end
        )
        return campaign_page

    async def start(self, id: str, *, tenant_id: str = "default", connection: Any = None) -> Campaign:
        """Send a campaign now, to all time zones, regardless of its send time.

        Raises NotFound, Conflict (CAMPAIGN_STATE).
        """
        return await self._run_on_campaign(connection, actions.start_campaign, tenant_id, id, self._clock.now())

    async def pause(
        self, id: str, reason: str | None = None, *, tenant_id: str = "default", connection: Any = None
    ) -> Campaign:  # fmt: skip
        """Open no more chunks; `resume` continues at the cursor. Raises NotFound, Conflict (CAMPAIGN_STATE)."""
        return await self._run_on_campaign(connection, actions.pause_campaign, tenant_id, id, reason, self._clock.now())

    async def resume(
        self, id: str, *, by: str | None = None, approve: bool = True, tenant_id: str = "default",
        connection: Any = None,
    ) -> Campaign:  # fmt: skip
        """Continue a paused campaign. If a size check paused it before its start, this approves it as `by`.

        Raises NotFound, Conflict (CAMPAIGN_STATE), and Refused (APPROVAL_MISSING) if such an approval is needed and
        `approve` is false.
        """
        return await self._run_on_campaign(
            connection, actions.resume_campaign, tenant_id, id, by, approve, self._clock.now()
        )

    async def stop(
        self, id: str, reason: str | None = None, *, tenant_id: str = "default", connection: Any = None
    ) -> Campaign:  # fmt: skip
        """Stop a campaign for good. Raises NotFound, Conflict (CAMPAIGN_STATE)."""
        return await self._run_on_campaign(connection, actions.stop_campaign, tenant_id, id, reason, self._clock.now())

    async def archive(
        self, id: str, archived: bool = True, *, tenant_id: str = "default", connection: Any = None
    ) -> Campaign:  # fmt: skip
        """Hide an ended campaign from lists, or show it again. Raises NotFound, Conflict (CAMPAIGN_STATE)."""
        return await self._run_on_campaign(
            connection, actions.archive_campaign, tenant_id, id, archived, self._clock.now()
        )

    async def delete(self, id: str, *, tenant_id: str = "default", connection: Any = None) -> Campaign:
        """Delete a campaign that is not being sent, and its results. Raises NotFound, Conflict (CAMPAIGN_STATE)."""
        return await self._run_on_campaign(connection, actions.delete_campaign, tenant_id, id, self._clock.now())

    async def retry(
        self, id: str, *, unknown: bool = False, tenant_id: str = "default", connection: Any = None
    ) -> Campaign:  # fmt: skip
        """Send again to recipients that were not reached or were left out by a stop, never to accepted ones.

        With `unknown` also to those whose result is unknown, who may get a second message. Raises NotFound, Conflict
        (CAMPAIGN_STATE).
        """
        return await self._run_on_campaign(
            connection,
            lambda tx: actions.retry_campaign(
                tx, tenant_id, _require_campaign_id(id), include_unknown=unknown, now=self._clock.now()
            ),
        )

    async def test(
        self, id: str, *, tokens: Sequence[str] = (), user_ids: Sequence[str] = (), variant: str | None = None,
        tenant_id: str = "default", connection: Any = None,
    ) -> NewJob:  # fmt: skip
        """Send the message, or one of its variants, now only to these tokens and users, in a separate job.

        Test messages are not counted. Raises NotFound, InvalidInput (TEST_DEVICES_MISSING, ...), Refused.
        """
        campaign = await self.get(id, tenant_id=tenant_id, connection=connection)
        _check_variant(campaign, variant)
        test_tokens = [*tokens]
        for user_id in user_ids:
            user_devices = await self._run(connection, devices.list_user_devices, tenant_id, user_id)
            test_tokens += [device.token for device in user_devices]
        if not 1 <= len(test_tokens) <= MAX_TEST_DEVICES:
            raise InvalidInput(
                f"The test has {len(test_tokens)} devices.", code="TEST_DEVICES_MISSING",
                fix=f"Specify tokens, or userIds with registered devices: 1 to {MAX_TEST_DEVICES} devices in total.",
            )  # fmt: skip
        plan = campaign.plan.for_variant(variant)
        plan = plan.personalize({"campaignId": campaign.id}) if campaign.plan.is_personal else plan
        test_content = content.build_content(plan, f"test-{campaign.id}", campaign.id)
        target = {
            "kind": "push", "tokens": test_tokens, "title": test_content.title, "body": test_content.body,
            "data": dict(test_content.data), "ttl": test_content.ttl, "collapseKey": test_content.collapse_key,
            **test_content.appearance,
        }  # fmt: skip
        target = {name: value for name, value in target.items() if value not in (None, {})}
        spec = JobSpec(topic="timebell.campaign-test", target=target, timezone=campaign.timezone, tenant_id=tenant_id)
        (job,) = await self._jobs.create([spec], connection=connection)
        assert isinstance(job, NewJob)
        return job

    async def preview(
        self, id: str, *, user_id: str | None = None, variant: str | None = None, tenant_id: str = "default",
        connection: Any = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the exact request that is sent to FCM for the first device of a user, or for an example.

        The message is in the specified variant, otherwise in that of the user. Placeholders of the example have their
        fallbacks. Raises NotFound (CAMPAIGN_NOT_FOUND, DEVICE_NOT_FOUND).
        """
        campaign = await self.get(id, tenant_id=tenant_id, connection=connection)
        _check_variant(campaign, variant)
        device = None
        if user_id is not None:
            found = await self._run(connection, devices.list_user_devices, tenant_id, user_id, 1)
            if not found:
                raise device_not_found(f"of user {user_id}")
            device = found[0]
        return content.preview_request(campaign, self._clock.now(), device, variant)

    async def results(self, id: str, *, tenant_id: str = "default", connection: Any = None) -> Sequence[VariantResult]:
        """Return the results of each variant, and of the recipients without one. Raises NotFound."""
        campaign = await self.get(id, tenant_id=tenant_id, connection=connection)
        found: Sequence[VariantResult] = await self._run(connection, results.count_results, campaign)
        return found

    async def report_open(
        self, id: str, token: str, *, tenant_id: str = "default", connection: Any = None
    ) -> bool:  # fmt: skip
        """Record that the device with a token opened the message; False if it did not get it. Raises NotFound."""
        campaign = await self.get(id, tenant_id=tenant_id, connection=connection)
        is_recipient: bool = await self._run(connection, results.record_open, campaign, token, self._clock.now())
        return is_recipient

    async def timetable(self, id: str, *, tenant_id: str = "default", connection: Any = None) -> Timetable:
        """Return when each time zone is sent to, for the devices registered now. Raises NotFound."""
        campaign = await self.get(id, tenant_id=tenant_id, connection=connection)
        counts = await self._run(
            connection, devices.count_by_timezone, tenant_id, campaign.filters, campaign.reference_time, campaign.id
        )
        counts_by_zone: dict[Any, int] = {}
        for name, count in counts.items():
            zone_name = zone_or_default(name if campaign.plan.is_zone_dependent else None, campaign.timezone)
            counts_by_zone[zone_name] = counts_by_zone.get(zone_name, 0) + count
        throttle = _Throttle(campaign.plan.chunk_size) if campaign.plan.chunk_delay is None else _Throttle(
            campaign.plan.chunk_size, campaign.plan.chunk_delay
        )  # fmt: skip
        send_time = campaign.plan.local_time or campaign.send_at
        now = self._clock.now()
        return build_timetable(
            counts_by_zone,
            send_time,
            now=now,
            quiet_hours=campaign.plan.quiet_hours,
            throttle=throttle,
            until=campaign.plan.expires_at,
        )

    async def deliveries(
        self, id: str, *, state: str | None = None, tenant_id: str = "default", limit: int = 50,
        cursor: str | None = None, connection: Any = None,
    ) -> Page[Mapping[str, Any]]:  # fmt: skip
        """Return a page of recipients with their results: sending, accepted, refused, unknown or unsent."""
        page.validate_paging(limit, None)
        campaign = await self.get(id, tenant_id=tenant_id, connection=connection)
        delivery_page: Page[Mapping[str, Any]] = await self._run(
            connection, recipients.list_deliveries, campaign.id, limit, cursor, state
        )
        return delivery_page

    async def chunks(
        self, id: str, *, tenant_id: str = "default", limit: int = 50, cursor: str | None = None, connection: Any = None
    ) -> Page[Mapping[str, Any]]:
        """Return a page of chunks with their start, end and result counts."""
        page.validate_paging(limit, None)
        campaign = await self.get(id, tenant_id=tenant_id, connection=connection)
        after = min(int(cursor[:20]), 2**31 - 1) if cursor is not None and cursor.isdecimal() else 0
        chunk_page: Page[Mapping[str, Any]] = await self._run(
            connection, recipients.list_chunks, campaign.id, limit, after
        )
        return chunk_page

    async def remaining(
        self, id: str, *, tenant_id: str = "default", limit: int = 50, cursor: str | None = None, connection: Any = None
    ) -> Page[Device]:
        """Return a page of the devices that the campaign was not sent to."""
        page.validate_paging(limit, None)
        campaign = await self.get(id, tenant_id=tenant_id, connection=connection)
        device_page: Page[Device] = await self._run(connection, recipients.list_remaining, campaign, limit, cursor)
        return device_page

    def _resolve_send_at(
        self, plan: CampaignPlan, send_at: datetime | str | None, timezone: str | ZoneInfo | None, now: datetime
    ) -> tuple[datetime, str]:  # fmt: skip
        """Return the send time and its time zone. Raises InThePast, InvalidInput."""
        if plan.local_time is not None:
            if send_at is not None:
                raise InvalidInput(
                    "sendAt and localTime exclude each other: one instant for all zones, or one per zone.",
                    code="INVALID_CAMPAIGN", fix="Specify only one of them.",
                )  # fmt: skip
            resolved = datetimes.resolve_run_at(plan.local_time, self._zone_or_default(timezone), None, now)
        else:
            default = self._default_timezone or ("UTC" if send_at is None else None)
            resolved = datetimes.resolve_run_at(send_at, timezone, default, now)
        return resolved.at, resolved.timezone

    def _zone_or_default(self, timezone: str | ZoneInfo | None) -> str | ZoneInfo:
        return timezone if timezone is not None else self._default_timezone or "UTC"

    async def _run_on_campaign(
        self, connection: Any, operation: Callable[..., Campaign | None], *args: Any
    ) -> Campaign:
        if len(args) > 1:
            args = (args[0], _require_campaign_id(args[1]), *args[2:])
        campaign: Campaign | None = await self._run(connection, operation, *args)
        if campaign is None:
            raise no_such_campaign(args[1] if args else "")
        return campaign

    async def _run(self, connection: Any, operation: Callable[..., Any], *args: Any) -> Any:
        await self._ensure_open()
        if connection is None:
            return await self._store.run(operation, *args)
        return await self._store.join(connection, operation, *args)


def _parse_message(message: Mapping[str, Any]) -> CampaignPlan:
    plan = CampaignPlan.from_json(message)
    content.check_message(plan)
    return plan


def _check_variant(campaign: Campaign, name: str | None) -> None:
    names = [variant.name for variant in campaign.plan.experiment.variants]
    if name is not None and name not in names:
        raise InvalidInput(
            f"The campaign has no variant {name!r:.40}.", code="UNKNOWN_VARIANT",
            fix=f"It has: {', '.join(names) or 'none'}.",
        )  # fmt: skip


def _parse_state(word: str) -> CampaignState:
    try:
        return CampaignState(word)
    except ValueError:
        raise InvalidInput(
            f"There is no state {word!r:.40}.", code="INVALID_STATUS", fix=f"Use one of {', '.join(CampaignState)}."
        ) from None


def parse_campaign_id(id_: Any) -> str | None:
    """Return a campaign id in canonical form; None if it is not a valid id."""
    return parse_uuid(str(id_))


def _require_campaign_id(id_: Any) -> str:
    """Return a campaign id in canonical form. Raises NotFound for an invalid id."""
    campaign_id = parse_campaign_id(id_)
    if campaign_id is None:
        raise no_such_campaign(id_)
    return campaign_id
