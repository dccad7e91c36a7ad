"""`/campaigns`: a push to many: made, changed until it starts, tested, steered, and who got it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import ConfigDict, Field

from timebell.api.devices import DevicePage, shown_device
from timebell.api.route import Guarded, Let, changes, missing, reads
from timebell.api.schedule_fields import Interval, ScheduleIn
from timebell.api.schedule_fields import read as read_schedule
from timebell.api.schedules import Match
from timebell.api.schemas import Body, Cursor, Id, Instant, Json, Limit, Name, Shown, answer, paged, utc
from timebell.client.campaigns import known_id
from timebell.errors import RevisionMissing, RevisionStale
from timebell.model.campaign_plan import OPTIONS, Campaign
from timebell.store.campaigns import campaigns as rows
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=Guarded, tags=["campaigns"])
RECURRENCES = ("cronExpression", "interval", "rrule", "dates")
States = Literal["pending", "running", "paused", "stopped", "completed"]
Fates = Literal["sending", "accepted", "refused", "unknown", "unsent"]


class MessageIn(Body):
    """What is sent, to whom, and how."""

    title: Annotated[str | None, Field(max_length=4096)] = None
    body: Annotated[str | None, Field(max_length=4096)] = None
    content: Annotated[str | None, Field(max_length=4096, description="The same as body.")] = None
    data: Annotated[dict[str, Json] | None, Field(description="All of it becomes strings; null is left out.")] = None
    fields: Annotated[dict[str, Json] | None, Field(description='{"rename": {"bible_code": "bibleCode"}}')] = None
    ttl: Annotated[int | None, Field(ge=0, le=28 * 86_400)] = None
    collapse_key: Annotated[str | None, Field(max_length=200)] = None
    notification_id: Annotated[str | None, Field(max_length=500)] = None
    filters: Annotated[
        dict[str, Json] | None,
        Field(description="As in POST /audiences/count: gender, ageMin, marketingOnOff, topic, ..."),
    ] = None
    marketing: bool | None = None
    chunk_size: Annotated[int | None, Field(ge=1, le=500)] = None
    chunk_delay_ms: Annotated[int | Literal["adaptive"] | None, Field(description="Or adaptive.")] = None
    quiet_hours: Annotated[dict[str, Json] | None, Field(description='{"start": "21:00", "end": "08:00"}')] = None
    local_time: Annotated[str | None, Field(max_length=32, description="A local time where each recipient is.")] = None
    expires_at: Instant | None = None
    unknown: Literal["leave", "retry"] | None = None
    canary: Annotated[dict[str, Json] | None, Field(description='{"size": 1000, "maxErrorRate": 0.05}')] = None
    max_recipients: Annotated[int | None, Field(ge=1)] = None
    max_change: Annotated[float | None, Field(ge=0)] = None
    approve_above: Annotated[int | None, Field(ge=0)] = None
    audience_as: Annotated[
        Literal["live", "pinned"] | None,
        Field(description="Who gets it is decided when it starts, or when it is made."),
    ] = None
    content_as: Annotated[
        Literal["live", "pinned"] | None, Field(description="Whether the message may be changed while it is sent.")
    ] = None
    name: Name | None = None
    send_at: Annotated[str | None, Field(max_length=64, description="Left out: now.")] = None
    timezone: Annotated[str | None, Field(max_length=64)] = None


class CampaignIn(MessageIn):
    """A campaign: now, at `sendAt`, or again and again by one recurrence."""

    cron_expression: Annotated[str | None, Field(max_length=256)] = None
    interval: Interval | None = None
    rrule: Annotated[str | None, Field(max_length=4096)] = None
    dates: Annotated[list[str] | None, Field(max_length=10_000)] = None


class CampaignOut(Shown):
    """A campaign and how far it is. A recurring one shows what each occurrence is made of: `scheduleId` names it."""

    model_config = ConfigDict(**{**Shown.model_config, "extra": "allow"})
    id: str
    name: str | None
    state: str
    reason: str | None
    send_at: Instant | None
    timezone: str | None
    schedule_id: str | None
    job_id: str | None
    counts: dict[str, int]
    total_sent: int
    left_out: dict[str, int]
    opened: int
    expected: int | None
    created_at: Instant | None
    created_by: str | None
    updated_at: Instant | None
    approved_by: str | None
    actual_send_start: Instant | None
    actual_send_end: Instant | None
    pinned_at: Instant | None
    revision: int


class CampaignPage(Shown):
    """Campaigns, newest first."""

    items: list[CampaignOut]
    next_cursor: str | None


class Rows(Shown):
    """A page of what a campaign keeps."""

    items: list[dict[str, Json]]
    next_cursor: str | None


class ReasonIn(Body):
    reason: Annotated[str | None, Field(max_length=500)] = None


class RetryIn(Body):
    unknown: Annotated[bool, Field(description="Also to those of whom nobody knows.")] = False


class TestIn(Body):
    tokens: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=100, default_factory=list)]
    user_ids: Annotated[list[Name], Field(max_length=100, default_factory=list)]


class Tested(Shown):
    """The job that sends it to the test devices."""

    job_id: str


class Previewed(Shown):
    """The request that is made for a device, as it goes over the wire."""

    request: dict[str, Json]


class TimetableOut(Shown):
    """When each zone is sent to, with who is registered now."""

    zones: list[dict[str, Json]]
    left_out: list[dict[str, Json]]
    recipients: int


def shown(found: Campaign) -> dict[str, Any]:
    """A campaign as it is answered."""
    counts = found.counts()
    return {
        **found.sending.json(), "id": found.id, "name": found.name, "state": found.state.value,
        "reason": found.reason, "sendAt": utc(found.send_at), "timezone": found.timezone,
        "scheduleId": found.schedule_id, "jobId": found.job_id,
        "counts": {
            "pending": counts.pending, "accepted": counts.accepted, "refused": counts.refused,
            "unknown": counts.unknown, "unsent": found.unsent,
        },
        "totalSent": found.accepted, "leftOut": found.left_out, "opened": found.opened, "expected": found.expected,
        "createdAt": utc(found.created_at), "createdBy": found.created_by, "updatedAt": utc(found.updated_at),
        "approvedBy": found.approved_by, "actualSendStart": utc(found.started_at),
        "actualSendEnd": utc(found.ended_at), "pinnedAt": utc(found.pinned_at), "revision": found.revision,
    }  # fmt: skip


def one(let: Let, found: Campaign, status: int = 200) -> Response:
    """A campaign as a response."""
    let.subject = found.id
    headers = {"ETag": f'"{found.revision}"'} | ({"Location": f"/api/v1/campaigns/{found.id}"} if status == 201 else {})
    return answer(shown(found), status, headers)


@routes.post("/campaigns", response_model=CampaignOut, status_code=201, **changes("campaign.create", Role.EDITOR))
async def create_campaign(body: CampaignIn, let: Let) -> Response:
    """Make a campaign. The answer is here before the first message leaves."""
    given = _given(body)
    recurrence = {name: given.pop(name) for name in RECURRENCES if given.get(name) is not None}
    message = {name: given[name] for name in OPTIONS if name in given}
    if recurrence:
        return await _recurring(let, given, message, recurrence)
    made = await let.app.campaigns.create(
        message, send_at=given.get("sendAt"), timezone=given.get("timezone"), name=given.get("name"),
        tenant_id=let.tenant_id, created_by=let.caller.actor, connection=let.connection,
    )  # fmt: skip
    return one(let, made, 201)


async def _recurring(
    let: Let, given: dict[str, Any], message: dict[str, Any], recurrence: dict[str, Any]
) -> Response:  # fmt: skip
    """A schedule whose every occurrence is a campaign."""
    named = {"name": given.get("name"), "timezone": given.get("timezone")}
    said = {**{name: value for name, value in named.items() if value is not None}, **recurrence, "topic": rows.TOPIC}
    _, spec, options = read_schedule(ScheduleIn.model_validate(said), let.app.settings.default_timezone)
    schedule = await let.app.campaigns.repeat(
        message, spec, send_at=given.get("sendAt"), tenant_id=let.tenant_id, created_by=let.caller.actor,
        connection=let.connection, **options,
    )  # fmt: skip
    let.subject = schedule.id
    return answer({
        **message, "id": schedule.id, "scheduleId": schedule.id, "name": schedule.name, "state": "pending",
        "reason": None, "sendAt": utc(schedule.next_fire_at), "timezone": schedule.timezone, "jobId": None,
        "counts": {}, "totalSent": 0, "leftOut": {}, "opened": 0, "expected": None,
        "createdAt": utc(schedule.created_at), "createdBy": schedule.created_by,
        "updatedAt": utc(schedule.updated_at), "approvedBy": None, "actualSendStart": None, "actualSendEnd": None,
        "pinnedAt": None, "revision": schedule.revision,
    }, 201, {"Location": f"/api/v1/schedules/{schedule.id}"})  # fmt: skip


def _given(body: Body) -> dict[str, Any]:
    given = body.model_dump(by_alias=True, exclude_unset=True)
    if "content" in given:
        given.setdefault("body", given["content"])
        del given["content"]
    return given


@routes.get("/campaigns", response_model=CampaignPage, **reads())
async def list_campaigns(
    let: Let, limit: Limit = 50, cursor: Cursor = None, state: Annotated[States | None, Query()] = None
) -> Response:  # fmt: skip
    """A page of campaigns, newest first."""
    page = await let.app.campaigns.list(state=state, tenant_id=let.tenant_id, limit=limit, cursor=cursor)
    return paged(page, [shown(found) for found in page])


@routes.get("/campaigns/{id}", response_model=CampaignOut, **reads())
async def get_campaign(id: Id, let: Let) -> Response:
    """A campaign, and how far it is."""
    return one(let, await let.app.campaigns.get(id, tenant_id=let.tenant_id))


@routes.patch("/campaigns/{id}", response_model=CampaignOut, **changes("campaign.update", Role.EDITOR))
async def patch_campaign(id: Id, body: MessageIn, let: Let, if_match: Match = None) -> Response:
    """Change one that has not started, or the message of one whose content is live; null takes a field back."""
    known = known_id(id)
    found: Campaign | None = None if known is None else await let.run(rows.find, let.tenant_id, known, lock=True)
    if found is None:
        raise missing("campaign", id)
    etag = f'"{found.revision}"'
    if if_match is None:
        raise RevisionMissing(
            "A change has to say of which revision.", fix=f"Send If-Match: {etag} (or *, to overwrite whatever is)."
        )
    if if_match != "*" and etag not in [each.strip().removeprefix("W/") for each in if_match.split(",")]:
        raise RevisionStale(
            f"The campaign is at revision {found.revision}, and the change is of {if_match:.40}.", existing=found.id,
            fix="Read it again, and change that.",
        )  # fmt: skip
    let.before = shown(found)
    changed = await let.app.campaigns.edit(id, _given(body), tenant_id=let.tenant_id, connection=let.connection)
    return one(let, changed)


@routes.post("/campaigns/{id}/start", response_model=CampaignOut, **changes("campaign.start", Role.OPERATOR))
async def start_campaign(id: Id, let: Let) -> Response:
    """Send it now, whatever time it was meant for."""
    return one(let, await let.app.campaigns.start(id, tenant_id=let.tenant_id, connection=let.connection))


@routes.post("/campaigns/{id}/pause", response_model=CampaignOut, **changes("campaign.pause", Role.OPERATOR))
async def pause_campaign(id: Id, let: Let, body: ReasonIn | None = None) -> Response:
    """Begin no more chunks; it keeps its cursor."""
    reason = None if body is None else body.reason
    return one(let, await let.app.campaigns.pause(id, reason, tenant_id=let.tenant_id, connection=let.connection))


@routes.post("/campaigns/{id}/resume", response_model=CampaignOut, **changes("campaign.resume", Role.OPERATOR))
async def resume_campaign(id: Id, let: Let) -> Response:
    """Go on at the cursor."""
    found = await let.app.campaigns.resume(
        id, by=let.caller.actor, approves=let.caller.role.covers(Role.ADMIN), tenant_id=let.tenant_id,
        connection=let.connection,
    )  # fmt: skip
    return one(let, found)


@routes.post("/campaigns/{id}/approve", response_model=CampaignOut, **changes("campaign.approve", Role.ADMIN))
async def approve_campaign(id: Id, let: Let) -> Response:
    """Let one go on that a gate stopped."""
    found = await let.app.campaigns.resume(id, by=let.caller.actor, tenant_id=let.tenant_id, connection=let.connection)
    return one(let, found)


@routes.post("/campaigns/{id}/stop", response_model=CampaignOut, **changes("campaign.stop", Role.OPERATOR))
async def stop_campaign(id: Id, let: Let, body: ReasonIn | None = None) -> Response:
    """Send to nobody else. `/deliveries` has who got it, `/left` who did not."""
    reason = None if body is None else body.reason
    return one(let, await let.app.campaigns.stop(id, reason, tenant_id=let.tenant_id, connection=let.connection))


@routes.post("/campaigns/{id}/retry", response_model=CampaignOut, **changes("campaign.retry", Role.OPERATOR))
async def retry_campaign(id: Id, let: Let, body: RetryIn | None = None) -> Response:
    """Send to those who were not reached; never to those it was accepted for."""
    unknown = body is not None and body.unknown
    found = await let.app.campaigns.retry(id, unknown=unknown, tenant_id=let.tenant_id, connection=let.connection)
    return one(let, found)


@routes.post("/campaigns/{id}/test", response_model=Tested, status_code=202, **changes("campaign.test", Role.OPERATOR))
async def test_campaign(id: Id, body: TestIn, let: Let) -> Response:
    """Send it now to these devices alone; it is counted nowhere."""
    job = await let.app.campaigns.test(
        id, tokens=body.tokens, user_ids=body.user_ids, tenant_id=let.tenant_id, connection=let.connection
    )
    let.subject = id
    return answer({"jobId": job.id}, 202, {"Location": f"/api/v1/jobs/{job.id}"})


@routes.get("/campaigns/{id}/preview", response_model=Previewed, **reads())
async def preview_campaign(id: Id, let: Let) -> Response:
    """The exact JSON that a phone is sent."""
    return answer({"request": await let.app.campaigns.preview(id, tenant_id=let.tenant_id)})


@routes.get("/campaigns/{id}/timetable", response_model=TimetableOut, **reads())
async def get_timetable(id: Id, let: Let) -> Response:
    """When each zone is sent to, and who is left out."""
    plan = await let.app.campaigns.timetable(id, tenant_id=let.tenant_id)
    zones = [
        {"timezone": zone, "first": utc(first), "last": utc(last), "recipients": count}
        for zone, first, last, count in plan.per_zone()
    ]
    left_out = [{"timezone": zone, "why": why.value, "recipients": n} for (zone, why), n in plan.left_out.items()]
    return answer({"zones": zones, "leftOut": left_out, "recipients": sum(each.size for each in plan.chunks)})


@routes.get("/campaigns/{id}/deliveries", response_model=Rows, **reads())
async def list_deliveries(
    id: Id, let: Let, limit: Limit = 50, cursor: Cursor = None, state: Annotated[Fates | None, Query()] = None
) -> Response:  # fmt: skip
    """Who it was sent to, and what became of it."""
    page = await let.app.campaigns.deliveries(id, state=state, tenant_id=let.tenant_id, limit=limit, cursor=cursor)
    return paged(page, [
        {"deviceId": row["recipient"], "state": row["state"], "code": row["code"], "messageId": row["message_id"],
         "chunk": row["chunk"]}
        for row in page
    ])  # fmt: skip


@routes.get("/campaigns/{id}/left", response_model=DevicePage, **reads())
async def list_left(id: Id, let: Let, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """Who it was not sent to."""
    page = await let.app.campaigns.left(id, tenant_id=let.tenant_id, limit=limit, cursor=cursor)
    return paged(page, [shown_device(device) for device in page])


@routes.get("/campaigns/{id}/chunks", response_model=Rows, **reads())
async def list_chunks(id: Id, let: Let, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """Its chunks: when each began and ended, and what became of those in it."""
    page = await let.app.campaigns.chunks(id, tenant_id=let.tenant_id, limit=limit, cursor=cursor)
    return paged(page, [
        {"number": row["number"], "jobId": row["job_id"], "state": row["state"], "timezone": row["timezone"],
         "size": row["size"], "accepted": row["accepted"], "refused": row["refused"], "unknown": row["unknown"],
         "unsent": row["unsent"], "startedAt": utc(row["started_at"]), "endedAt": utc(row["ended_at"])}
        for row in page
    ])  # fmt: skip
