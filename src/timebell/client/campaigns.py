"""The verbs for campaigns: create, change, test, start, pause, resume, stop, retry, and who got it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from timebell.alarm import Alarm
from timebell.campaigns import content
from timebell.client import datetimes
from timebell.client.jobs import SOON, Jobs, JobSpec
from timebell.client.schedules import Schedules
from timebell.client.validation import text, uuid_of
from timebell.clock import Clock
from timebell.errors import InvalidInput
from timebell.ids import new_id
from timebell.model import page
from timebell.model.audience import Device
from timebell.model.campaign import CampaignState, Timetable, timetable
from timebell.model.campaign import Throttle as _Throttle
from timebell.model.campaign_plan import Campaign, Sending, zone_of
from timebell.model.job import NewJob
from timebell.model.page import Page
from timebell.model.schedule import Schedule
from timebell.recurrence import Spec
from timebell.store.campaigns import campaigns, devices
from timebell.store.campaigns.campaigns import no_such
from timebell.store.dialects.base import Store

MOST_TESTED = 100


class Campaigns:
    """The verbs. `opened` makes sure that the store is open; `jobs` make the test messages."""

    def __init__(
        self, store: Store, clock: Clock, working: Alarm, opened: Callable[[], Any], jobs: Jobs,
        schedules: Schedules, default_timezone: str | None,
    ) -> None:  # fmt: skip
        self._store = store
        self._clock = clock
        self._working = working
        self._opened = opened
        self._jobs = jobs
        self._schedules = schedules
        self._default_timezone = default_timezone

    async def create(
        self, message: Mapping[str, Any], *, send_at: datetime | str | None = None, timezone: str | None = None,
        name: str | None = None, tenant_id: str = "default", created_by: str | None = None, connection: Any = None,
    ) -> Campaign:  # fmt: skip
        """Make a campaign, to be sent at `send_at` (None: now; a naive one is local time in `timezone`).

        `message` has what POST /campaigns has: title, body, data, filters, chunkSize, chunkDelayMs and the rest, in
        camelCase. Raises InvalidInput (CAMPAIGN_INVALID, CONSENT_FILTER_MISSING, PUSH_MESSAGE_INVALID,
        PUSH_MESSAGE_TOO_LARGE, TOPIC_UNKNOWN, ...), InThePast.
        """
        await self._opened()
        now = self._clock.now()
        sending = _checked(message)
        at, place = self._when(sending, send_at, timezone, now)
        made = Campaign(
            id=new_id(now), tenant_id=text(tenant_id, "tenant_id"), name=None if name is None else text(name, "name"),
            sending=sending, state=CampaignState.PENDING, send_at=at, timezone=place, created_at=now, updated_at=now,
            created_by=created_by,
        )  # fmt: skip
        await self._run(connection, campaigns.create, made, now + SOON)
        self._working.poke_threadsafe()
        return made

    async def repeat(
        self, /, message: Mapping[str, Any], recurrence: Spec, *, send_at: Any = None, connection: Any = None,
        **options: Any,
    ) -> Schedule:  # fmt: skip
        """A schedule whose every occurrence is a campaign, with who is registered then. `options` are those of
        `schedule_repeat` (name, timezone, catch_up, ...). Raises what `create` and `schedule_repeat` do."""
        await self._opened()
        sending = _checked(message)
        if sending.local is not None or send_at is not None:
            raise InvalidInput(
                "A recurrence says when it is sent: sendAt and localTime have no place beside it.",
                code="CAMPAIGN_INVALID", fix="Leave them out.",
            )  # fmt: skip
        now = self._clock.now()
        await self._run(connection, campaigns.check_audience, options.get("tenant_id", "default"), sending)
        options.setdefault("name", f"campaign {new_id(now)}")
        what = {**options, "payload": {"campaign": sending.json()}, "target": campaigns.TARGET}
        draft = self._schedules.draft(campaigns.TOPIC, recurrence, what, now)
        return await self._schedules.put(draft, replace=False, connection=connection)

    async def edit(
        self, id: str, change: Mapping[str, Any], *, revision: int | None = None, tenant_id: str = "default",
        connection: Any = None,
    ) -> Campaign:  # fmt: skip
        """Change one that has not started: any field of POST /campaigns; null takes one back.

        Raises NotFound, Conflict (CAMPAIGN_STATE, CAMPAIGN_CHANGED), and what `create` does.
        """
        now = self._clock.now()
        asked = dict(change)
        when = {name: asked.pop(name) for name in ("sendAt", "timezone") if name in asked}
        named = asked.pop("name", ...)

        def changed(found: Campaign) -> Campaign:
            sending = _checked({**found.sending.json(), **asked})
            new = dataclasses.replace(found, sending=sending)
            if when or sending.local != found.sending.local:
                given = when.get("sendAt", None if sending.local else found.send_at)
                new.send_at, new.timezone = self._when(sending, given, when.get("timezone") or found.timezone, now)
            if named is not ...:
                new.name = None if named is None else text(named, "name")
            return new

        found = await self._one(connection, campaigns.edit, tenant_id, id, changed, revision, now, now + SOON)
        self._working.poke_threadsafe()
        return found

    async def get(self, id: str, *, tenant_id: str = "default", connection: Any = None) -> Campaign:
        """One campaign. Raises NotFound (CAMPAIGN_NOT_FOUND)."""
        return await self._one(connection, campaigns.find, tenant_id, id)

    async def list(
        self, *, state: str | None = None, tenant_id: str = "default", limit: int = 50, cursor: str | None = None,
        connection: Any = None,
    ) -> Page[Campaign]:  # fmt: skip
        """A page of campaigns, newest first. Raises InvalidInput."""
        before = page.check(limit, cursor)
        found: Page[Campaign] = await self._run(
            connection, campaigns.page, tenant_id, limit, before, None if state is None else _state(state)
        )
        return found

    async def start(self, id: str, *, tenant_id: str = "default", connection: Any = None) -> Campaign:
        """Send it now, to all at once, whatever time it was meant for. Raises NotFound, Conflict (CAMPAIGN_STATE)."""
        return await self._moved(connection, campaigns.start, tenant_id, id, self._clock.now())

    async def pause(
        self, id: str, reason: str | None = None, *, tenant_id: str = "default", connection: Any = None
    ) -> Campaign:  # fmt: skip
        """Begin no more chunks; it keeps its cursor. Raises NotFound, Conflict (CAMPAIGN_STATE)."""
        return await self._moved(connection, campaigns.pause, tenant_id, id, reason, self._clock.now())

    async def resume(
        self, id: str, *, by: str | None = None, approves: bool = True, tenant_id: str = "default",
        connection: Any = None,
    ) -> Campaign:  # fmt: skip
        """Go on where it paused. Where a gate stopped it this approves, unless `approves` is False: then that is
        refused. Raises NotFound, Conflict (CAMPAIGN_STATE), Refused (APPROVAL_MISSING)."""
        return await self._moved(connection, campaigns.resume, tenant_id, id, by, approves, self._clock.now())

    async def stop(
        self, id: str, reason: str | None = None, *, tenant_id: str = "default", connection: Any = None
    ) -> Campaign:  # fmt: skip
        """Send to nobody else, for good. Raises NotFound, Conflict (CAMPAIGN_STATE)."""
        return await self._moved(connection, campaigns.stop, tenant_id, id, reason, self._clock.now())

    async def retry(
        self, id: str, *, unknown: bool = False, tenant_id: str = "default", connection: Any = None
    ) -> Campaign:  # fmt: skip
        """Send to those who were not reached, and to those a stop left out; never to whom it was accepted for. With
        `unknown` also to those of whom nobody knows. Raises NotFound, Conflict (CAMPAIGN_STATE)."""
        return await self._moved(
            connection, lambda tx: campaigns.retry(tx, tenant_id, _id(id), unknown=unknown, now=self._clock.now())
        )

    async def test(
        self, id: str, *, tokens: Sequence[str] = (), user_ids: Sequence[str] = (), tenant_id: str = "default",
        connection: Any = None,
    ) -> NewJob:  # fmt: skip
        """Send it now to these devices alone, and to these people's: a job of its own, counted nowhere.

        Raises NotFound, InvalidInput (TEST_DEVICES_MISSING, ...), Refused.
        """
        found = await self.get(id, tenant_id=tenant_id, connection=connection)
        given = [*tokens]
        for user_id in user_ids:
            theirs = await self._run(connection, devices.of_user, tenant_id, user_id)
            given += [device.token for device in theirs]
        if not 1 <= len(given) <= MOST_TESTED:
            raise InvalidInput(
                f"These are {len(given)} devices to test on.", code="TEST_DEVICES_MISSING",
                fix=f"Give 1 to {MOST_TESTED} tokens, or userIds of people with devices.",
            )  # fmt: skip
        what = content.content_of(found.sending, f"test-{found.id}")
        target = {
            "kind": "push", "tokens": given, "title": what.title, "body": what.body, "data": dict(what.data),
            "ttl": what.ttl, "collapseKey": what.collapse_key,
        }  # fmt: skip
        target = {name: value for name, value in target.items() if value not in (None, {})}
        spec = JobSpec(topic="timebell.campaign-test", target=target, timezone=found.timezone, tenant_id=tenant_id)
        (made,) = await self._jobs.create([spec], connection=connection)
        assert isinstance(made, NewJob)
        return made

    async def preview(self, id: str, *, tenant_id: str = "default", connection: Any = None) -> dict[str, Any]:
        """The very request that is made for a device. Raises NotFound."""
        return content.preview(await self.get(id, tenant_id=tenant_id, connection=connection), self._clock.now())

    async def timetable(self, id: str, *, tenant_id: str = "default", connection: Any = None) -> Timetable:
        """When each zone is sent to, with who is registered now. Raises NotFound."""
        found = await self.get(id, tenant_id=tenant_id, connection=connection)
        counts = await self._run(connection, devices.zones, tenant_id, found.filters)
        audience: dict[Any, int] = {}
        for name, count in counts.items():
            place = zone_of(name if found.sending.by_zone else None, found.timezone)
            audience[place] = audience.get(place, 0) + count
        throttle = _Throttle(found.sending.size) if found.sending.delay is None else _Throttle(
            found.sending.size, found.sending.delay
        )  # fmt: skip
        when = found.sending.local or found.send_at
        now = self._clock.now()
        return timetable(
            audience, when, now=now, quiet=found.sending.quiet, throttle=throttle, until=found.sending.expires_at
        )

    async def deliveries(
        self, id: str, *, state: str | None = None, tenant_id: str = "default", limit: int = 50,
        cursor: str | None = None, connection: Any = None,
    ) -> Page[Mapping[str, Any]]:  # fmt: skip
        """A page of who it was sent to, and what became of it (sending, accepted, refused, unknown, unsent)."""
        page.check(limit, None)
        found = await self.get(id, tenant_id=tenant_id, connection=connection)
        got: Page[Mapping[str, Any]] = await self._run(connection, campaigns.reached, found.id, limit, cursor, state)
        return got

    async def chunks(
        self, id: str, *, tenant_id: str = "default", limit: int = 50, cursor: str | None = None, connection: Any = None
    ) -> Page[Mapping[str, Any]]:
        """A page of its chunks: when each began and ended, and what became of those in it."""
        page.check(limit, None)
        found = await self.get(id, tenant_id=tenant_id, connection=connection)
        after = min(int(cursor[:20]), 2**31 - 1) if cursor is not None and cursor.isdecimal() else 0
        got: Page[Mapping[str, Any]] = await self._run(connection, campaigns.chunk_page, found.id, limit, after)
        return got

    async def left(
        self, id: str, *, tenant_id: str = "default", limit: int = 50, cursor: str | None = None, connection: Any = None
    ) -> Page[Device]:
        """A page of those it was not sent to."""
        page.check(limit, None)
        found = await self.get(id, tenant_id=tenant_id, connection=connection)
        rest: Page[Device] = await self._run(connection, campaigns.left, found, limit, cursor)
        return rest

    def _when(
        self, sending: Sending, send_at: datetime | str | None, timezone: str | None, now: datetime
    ) -> tuple[datetime, str]:  # fmt: skip
        """The instant and its zone. Raises InThePast, InvalidInput."""
        if sending.local is not None:
            if send_at is not None:
                raise InvalidInput(
                    "sendAt is one instant for all, localTime one for each.", code="CAMPAIGN_INVALID",
                    fix="Give one of them.",
                )  # fmt: skip
            when = datetimes.read(sending.local, timezone or self._default_timezone or "UTC", None, now)
        else:
            default = self._default_timezone or ("UTC" if send_at is None else None)
            when = datetimes.read(send_at, timezone, default, now)
        return when.at, when.timezone

    async def _moved(self, connection: Any, operation: Callable[..., Campaign | None], *args: Any) -> Campaign:
        found = await self._one(connection, operation, *args)
        self._working.poke_threadsafe()
        return found

    async def _one(self, connection: Any, operation: Callable[..., Campaign | None], *args: Any) -> Campaign:
        if len(args) > 1:
            args = (args[0], _id(args[1]), *args[2:])
        found: Campaign | None = await self._run(connection, operation, *args)
        if found is None:
            raise no_such(args[1] if args else "")
        return found

    async def _run(self, connection: Any, operation: Callable[..., Any], *args: Any) -> Any:
        await self._opened()
        if connection is None:
            return await self._store.run(operation, *args)
        return await self._store.join(connection, operation, *args)


def _checked(message: Mapping[str, Any]) -> Sending:
    sending = Sending.read(message)
    content.check(sending)
    return sending


def _state(word: str) -> CampaignState:
    try:
        return CampaignState(word)
    except ValueError:
        raise InvalidInput(
            f"There is no state {word!r:.40}.", code="STATUS_INVALID", fix=f"One of: {', '.join(CampaignState)}."
        ) from None


def known_id(id_: Any) -> str | None:
    """A campaign's id in its usual form; None for what is none."""
    return uuid_of(str(id_))


def _id(id_: Any) -> str:
    """Raises NotFound for what is no id."""
    found = known_id(id_)
    if found is None:
        raise no_such(id_)
    return found
