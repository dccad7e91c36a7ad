"""One call of every API operation, in a world with two tenants.

The isolation tests fail for an operation without an entry here. A new operation needs an entry that states how to call
it and which of its objects other tenants must not see.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from timebell.api import v1
from timebell.api.users import SESSION_ID_LENGTH
from timebell.features.campaigns.model.audience_source import AudienceSource
from timebell.features.campaigns.store import audiences, chunks
from timebell.ids import new_id, new_ids
from timebell.model.job import Completion, JobState, NewJob
from timebell.model.routes import ALL_ROUTES, Routes
from timebell.recurrence import tzdata_version
from timebell.recurrence.instants import format_instant
from timebell.store.cluster import nodes
from timebell.store.jobs import claim, complete, repository
from timebell.store.tenancy import api_keys as key_rows
from timebell.store.tenancy import users
from timebell.store.transaction import Transaction
from timebell.targets.base import Delivery, Outcome
from timebell.tenancy.roles import Role
from timebell.tenancy.tokens import attempt_token
from timebell.tenancy.users import Session, User, session_id

from .web import NIGHTLY, SECRET, Web

PREFIX = "/api/v1"
OURS, THEIRS = "ours", "theirs"
SPAN = {"from": "2026-01-01T00:00:00Z", "to": "2026-01-01T05:00:00Z"}


@dataclass(frozen=True)
class Call:
    """A call of an operation.

    `{schedule}`, `{job}`, `{key}` and so on in the path are objects of our tenant. `object`: other tenants get a 404
    for it. `shared`: the response is the same for all tenants.
    """

    path: str
    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    object: bool = False
    shared: bool = False


LATER = "2040-01-01T00:00:00Z"
LINES = b'{"topic": "t.t", "runAt": "2040-01-01T00:00:00Z"}\n'
PHONES = b'{"token": "phone-of-one"}\n'
AUDIENCE = {"url": "sqlite:///:memory:", "query": "SELECT 1 AS id, 'phone-of-one' AS token", "key": "id"}
PUSH = ("/devices", "/audiences", "/segments", "/campaigns", "/opens")
TRIGGERS = ("/sources", "/hooks", "/triggers")
MATCH = {"if_match": "*"}
HOOK = {"kind": "http", "options": {"url": "https://example.com/hook"}}
TOKENS = {"accessToken": "a-1", "refreshToken": "r-1", "expiresInSeconds": 3600}
ITEMS: dict[str, Any] = {"items": [{"key": "1", "version": 1, "fields": {"start_at": LATER}}]}
TRIGGER = {"source": "{source}", "column": "start_at", "topic": "secret.topic"}
BODY = {key: value for key, value in NIGHTLY.items() if key != "name"}
CALLS: dict[str, Call] = {
    "createSchedule": Call("/schedules", {**NIGHTLY, "name": "{new}"}, 201),
    "listSchedules": Call("/schedules?limit=500"),
    "previewSchedule": Call("/schedules/preview", BODY),
    "putSchedule": Call("/schedules/by-name/{new}", BODY, 201),
    "getSchedule": Call("/schedules/{schedule}", object=True),
    "patchSchedule": Call("/schedules/{schedule}", {"description": "x"}, headers=MATCH, object=True),
    "deleteSchedule": Call("/schedules/{schedule}", headers=MATCH, object=True),
    "pauseSchedule": Call("/schedules/{schedule}/pause", {"reason": "x"}, object=True),
    "resumeSchedule": Call("/schedules/{schedule}/resume", {"catchUp": False}, object=True),
    "triggerSchedule": Call("/schedules/{schedule}/trigger", status=201, object=True),
    "backfillSchedule": Call("/schedules/{schedule}/backfill", SPAN, object=True),
    "skipNextOccurrence": Call("/schedules/{schedule}/skip-next", object=True),
    "overrideOccurrence": Call("/schedules/{schedule}/overrides", {"at": "{next}", "action": "skip"}, object=True),
    "undoOverride": Call("/schedules/{skipping}/overrides?at={next}", object=True),
    "revertSchedule": Call("/schedules/{schedule}/revert", {"revision": 1}, object=True),
    "listExecutions": Call("/schedules/{schedule}/executions", object=True),
    "listNextOccurrences": Call("/schedules/{schedule}/next", object=True),
    "listRevisions": Call("/schedules/{schedule}/revisions", object=True),
    "listScheduleHistory": Call("/schedules/{schedule}/history", object=True),
    "importJobs": Call("/jobs/bulk", LINES, 201, headers={"content_type": "application/x-ndjson"}),
    "createJob": Call("/jobs", {"topic": "t.t", "runAt": LATER}, 201),
    "previewJob": Call("/jobs/preview", {"topic": "t.t", "runAt": LATER}),
    "listJobs": Call("/jobs?limit=500"),
    "cancelJobs": Call("/jobs/cancel", {"filter": {"topic": "secret.topic"}}, 202),
    "getJob": Call("/jobs/{job}", object=True),
    "cancelJob": Call("/jobs/{job}/cancel", object=True),
    "rescheduleJob": Call("/jobs/{job}/reschedule", {"runAt": LATER}, 201, object=True),
    "redeliverJob": Call("/jobs/{sent}/redeliver", object=True),
    "retryJob": Call("/jobs/{dead}/retry", object=True),
    "completeJob": Call("/jobs/{held}/complete", {"token": "{token}"}, object=True),
    "failJob": Call("/jobs/{held}/fail", {"token": "{token}", "error": "x"}, object=True),
    "recordJobHeartbeat": Call("/jobs/{held}/heartbeat", {"token": "{token}"}, object=True),
    "claimJobs": Call("/claims", {"worker": "w", "topics": ["secret.topic"], "max": 500, "waitSeconds": 0}),
    "renewClaims": Call("/claims/heartbeat", {"worker": "w", "jobs": []}),
    "completeClaims": Call("/claims/complete", {"jobs": [{"jobId": "{held}", "token": "{token}"}]}),
    "failClaims": Call("/claims/fail", {"jobs": [{"jobId": "{held}", "token": "{token}", "error": "x"}]}),
    "returnClaims": Call("/claims/return", {"jobs": [{"jobId": "{held}", "token": "{token}"}]}),
    "listDeadLetters": Call("/dead-letters?limit=500"),
    "retryDeadLetters": Call("/dead-letters/retry", {"filter": {"topic": "secret.topic"}}, 202),
    "discardDeadLetters": Call("/dead-letters/discard", {"filter": {"topic": "secret.topic"}}, 202),
    "listBacklogs": Call("/backlogs"),
    "releaseBacklogs": Call("/backlogs/release", {"scheduleId": "{schedule}"}, object=True),
    "discardBacklogs": Call("/backlogs/discard", {"scheduleId": "{schedule}"}, object=True),
    "listOperations": Call("/operations?limit=500"),
    "getOperation": Call("/operations/{operation}", object=True),
    "cancelOperation": Call("/operations/{operation}/cancel", object=True),
    "listQueues": Call("/queues"),
    "getQueue": Call("/queues/narrow"),
    "putQueue": Call("/queues/narrow", {"concurrency": 5}),
    "pauseQueue": Call("/queues/narrow/pause", {"reason": "x"}),
    "resumeQueue": Call("/queues/narrow/resume"),
    "pauseAll": Call("/pause-all", {"reason": "x"}),
    "resumeAll": Call("/resume-all"),
    "getAudit": Call("/audit?from={hour}&to={now}"),
    "explainOccurrence": Call("/schedules/{schedule}/why?at={next}", object=True),
    "createKey": Call("/keys", {"name": "k", "role": "viewer"}, 201),
    "listKeys": Call("/keys?limit=500"),
    "getKey": Call("/keys/{key}", object=True),
    "revokeKey": Call("/keys/{key}", object=True),
    "createUser": Call("/users", {"name": "{new}", "role": "viewer", "password": "correct horse battery"}, 201),
    "listUsers": Call("/users?limit=500"),
    "getUser": Call("/users/{user}", object=True),
    "patchUser": Call("/users/{user}", {"role": "operator", "enabled": False}, object=True),
    "deleteUser": Call("/users/{user}", object=True),
    "resetUserTotp": Call("/users/{user}/totp", object=True),
    "listUserSessions": Call("/users/{user}/sessions", object=True),
    "endUserSessions": Call("/users/{user}/sessions", object=True),
    "endUserSession": Call("/users/{user}/sessions/{session}", object=True),
    "createTenant": Call("/tenants", {"id": "{new}"}, 201),
    "listTenants": Call("/tenants"),
    "getTenant": Call("/tenants/ours", object=True),
    "patchTenant": Call("/tenants/ours", {"limits": {"schedules": 9000}}, object=True),
    "getTenantUsage": Call("/tenants/ours/usage", object=True),
    "listNodes": Call("/nodes", shared=True),
    "drainNode": Call("/nodes/{node}/drain", shared=True),
    # Records of refused requests contain the ids that the refused tenant sent.
    "listAuditLog": Call("/audit-log?limit=500&outcome=done"),
    "exportAuditLog": Call("/audit-log/export?outcome=done"),
    "listCalendars": Call("/calendars"),
    "getCalendar": Call("/calendars/{calendar}", object=True),
    "putCalendar": Call("/calendars/{new}", {"holidays": ["2040-01-01"]}),
    "listCalendarVersions": Call("/calendars/{calendar}/versions", object=True),
    "createSecret": Call("/secrets", {"name": "{new}", "value": "v"}, 201),
    "listSecrets": Call("/secrets"),
    "getSecret": Call("/secrets/{secret}", object=True),
    "replaceSecret": Call("/secrets/{secret}", {"value": "w"}, object=True),
    "deleteSecret": Call("/secrets/{secret}", object=True),
    "createTarget": Call("/targets", {"name": "{new}", **HOOK}, 201),
    "listTargets": Call("/targets"),
    "getTarget": Call("/targets/{target}", object=True),
    "listTargetHistory": Call("/targets/{target}/history", object=True),
    "putTarget": Call("/targets/{new}", HOOK),
    "deleteTarget": Call("/targets/{target}", object=True),
    "enableTarget": Call("/targets/{target}/enable", object=True),
    "rotateTargetSecret": Call("/targets/{target}/rotate-secret", {"overlapSeconds": 60}, object=True),
    "testTarget": Call("/targets/{target}/test", object=True),
    "createConnection": Call("/connections", {"name": "{new}", **TOKENS}, 201),
    "listConnections": Call("/connections"),
    "getConnection": Call("/connections/{connection}", object=True),
    "reauthorizeConnection": Call("/connections/{connection}/reauthorize", TOKENS, object=True),
    "deleteConnection": Call("/connections/{connection}", object=True),
    "createSource": Call("/sources", {"name": "{new}"}, 201),
    "listSources": Call("/sources"),
    "getSource": Call("/sources/{source}", object=True),
    "putSource": Call("/sources/{new}", {"kind": "webhook"}),
    "deleteSource": Call("/sources/{empty}", object=True),
    "listSourceItems": Call("/sources/{source}/items", object=True),
    "putSourceItems": Call("/sources/{source}/items", ITEMS, object=True),
    "receiveWebhook": Call("/hooks/{sourceId}", ITEMS, object=True),
    "createTrigger": Call("/triggers", {"name": "{new}", **TRIGGER}, 201, object=True),
    "listTriggers": Call("/triggers"),
    "getTrigger": Call("/triggers/{trigger}", object=True),
    "listTriggerHistory": Call("/triggers/{trigger}/history", object=True),
    "putTrigger": Call("/triggers/{new}", TRIGGER, object=True),
    "deleteTrigger": Call("/triggers/{trigger}", status=202, object=True),
    "pauseTrigger": Call("/triggers/{trigger}/pause", {"reason": "x"}, object=True),
    "resumeTrigger": Call("/triggers/{trigger}/resume", object=True),
    "getTriggerItem": Call("/triggers/{trigger}/why?item=1", object=True),
    "auditTrigger": Call("/triggers/{trigger}/audit?from={hour}&to={now}", object=True),
    "listNotFired": Call("/triggers/{trigger}/not-fired", object=True),
    "fireTriggerItem": Call("/triggers/{trigger}/fire", {"item": "1"}, object=True),
    "skipTriggerItem": Call("/triggers/{trigger}/skip", {"item": "1"}, object=True),
    "previewTrigger": Call("/triggers/{trigger}/preview", {"rows": [{"start_at": LATER}]}, object=True),
    "scanTrigger": Call("/triggers/{trigger}/scan", status=202, object=True),
    "registerDevice": Call("/devices", {"token": "phone-of-{new}"}, 201),
    "listDevices": Call("/devices?limit=500"),
    "getDevice": Call("/devices/{device}", object=True),
    "deleteDevice": Call("/devices/{device}", object=True),
    "refreshDevice": Call("/devices/refresh", {"oldToken": "{phone}", "token": "phone-of-{new}"}, object=True),
    "deleteDevices": Call("/devices/delete", {"tokens": ["phone-of-none"]}),
    "importDevices": Call("/devices/bulk", PHONES, 201, headers={"content_type": "application/x-ndjson"}),
    "countAudience": Call("/audiences/count", {}),
    "listAudiences": Call("/audiences"),
    "getAudience": Call("/audiences/{audience}", object=True),
    "putAudience": Call("/audiences/{new}", AUDIENCE),
    "refreshAudience": Call("/audiences/{audience}/refresh", status=202, object=True),
    "deleteAudience": Call("/audiences/{audience}", object=True),
    "listSegments": Call("/segments"),
    "getSegment": Call("/segments/{segment}", object=True),
    "putSegment": Call("/segments/{new}", {"filters": {"platform": "ios"}}),
    "deleteSegment": Call("/segments/{segment}", object=True),
    "createCampaign": Call("/campaigns", {"title": "Hello", "sendAt": LATER}, 201),
    "listCampaigns": Call("/campaigns?limit=500"),
    "getCampaign": Call("/campaigns/{campaign}", object=True),
    "listCampaignHistory": Call("/campaigns/{campaign}/history", object=True),
    "patchCampaign": Call("/campaigns/{campaign}", {"title": "x"}, headers=MATCH, object=True),
    "startCampaign": Call("/campaigns/{campaign}/start", object=True),
    "pauseCampaign": Call("/campaigns/{going}/pause", {"reason": "x"}, object=True),
    "resumeCampaign": Call("/campaigns/{going}/resume", object=True),
    "approveCampaign": Call("/campaigns/{going}/approve", object=True),
    "stopCampaign": Call("/campaigns/{campaign}/stop", {"reason": "x"}, object=True),
    "archiveCampaign": Call("/campaigns/{stopped}/archive", object=True),
    "unarchiveCampaign": Call("/campaigns/{stopped}/unarchive", object=True),
    "deleteCampaign": Call("/campaigns/{stopped}", object=True),
    "retryCampaign": Call("/campaigns/{stopped}/retry", {"unknown": True}, object=True),
    "testCampaign": Call("/campaigns/{campaign}/test", {"tokens": ["phone-of-a-tester"]}, 202, object=True),
    "previewCampaign": Call("/campaigns/{campaign}/preview", object=True),
    "getCampaignTimetable": Call("/campaigns/{campaign}/timetable", object=True),
    "getCampaignResults": Call("/campaigns/{campaign}/results", object=True),
    "reportOpen": Call("/opens", {"campaignId": "{campaign}", "token": "phone-of-one"}),
    "listDeliveries": Call("/campaigns/{campaign}/deliveries", object=True),
    "exportDeliveries": Call("/campaigns/{campaign}/deliveries/export?format=ndjson", object=True),
    "listRemainingRecipients": Call("/campaigns/{campaign}/remaining", object=True),
    "listChunks": Call("/campaigns/{campaign}/chunks", object=True),
    "getForecast": Call("/forecast"),
    "listUpcoming": Call("/forecast/upcoming"),
    "streamEvents": Call("/events"),
}  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """An operation of the OpenAPI document."""

    id: str
    method: str
    path: str
    role: Role
    action: str | None
    scope: str
    takes: str | None
    """The schema of its JSON body."""


def operations() -> list[Operation]:
    """Return every operation of the API."""
    found = []
    for path, methods in v1.build_openapi()["paths"].items():
        for method, details in methods.items():
            body = details.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            found.append(Operation(
                details["operationId"], method.upper(), path, Role(details["x-role"]), details.get("x-action"),
                path.removeprefix(f"{PREFIX}/").split("/")[0], None if body is None else str(body),
            ))  # fmt: skip
    return found


def _create_attempted_jobs(tx: Transaction, tenant_id: str, now: datetime) -> list[str]:
    """Create a dead letter, a running job and a sent webhook; return their ids."""
    due = now - timedelta(minutes=1)  # due even if the clock of the database is slightly behind
    created = [
        NewJob(
            id=id_, tenant_id=tenant_id, topic="secret.topic", scheduled_at=due, run_at=due, timezone="UTC",
            created_at=now, route="@http" if target else "secret.topic", queue=f"q-{id_}", target=target,
        )
        for id_, target in zip(new_ids(now, 3), (None, None, '{"kind":"http","options":{}}'), strict=True)
    ]  # fmt: skip
    repository.create(tx, created, "error")
    for one in created:
        lane = claim.QueueLane(one.queue, 0, None, None, has_limits=False)
        assert len(claim.claim_batch(tx, lane, ALL_ROUTES, new_id(now), 1, now)) == 1
    complete.complete_jobs(tx, [Completion(created[0].id, 1, JobState.FAILED, now, error="bad", code="ValueError")])
    complete.complete_jobs(tx, [Completion(created[2].id, 1, JobState.COMPLETED, now)])
    return [one.id for one in created]


class Receiver:
    """A target that accepts every delivery, without a network."""

    kind = "http"

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        return options

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        return Outcome.ok({"status": 200, "body": ""})

    async def close(self) -> None:
        """Close nothing: there are no connections."""


class Phones(Receiver):
    """The same for push."""

    kind = "push"


@dataclass
class World:
    """Two tenants with keys of every role."""

    web: Web
    role: dict[Role, str]
    """Our keys by role."""
    other: dict[Role, str]
    """Keys of the other tenant by role."""
    revoked: str
    expired: str
    names: dict[str, str]
    """Values of the `{...}` placeholders in paths and bodies."""
    count: int = 0
    called: str = ""
    """The path of the last call."""
    tenant: str = OURS

    @classmethod
    async def make(cls, web: Web) -> World:
        """Create the keys, a node and the first objects."""
        now = web.app.clock.now()
        ours = {role: await web.key(role, None if role is Role.PLATFORM else OURS) for role in Role}
        others = {role: await web.key(role, THEIRS) for role in Role if role is not Role.PLATFORM}
        expired = await web.key("admin", OURS, expires_at=now - timedelta(seconds=1))
        revoked = await web.key("admin", OURS)
        await web.app.store.run(key_rows.revoke_key, OURS, revoked.split("_")[2], now)
        node = nodes.Node(new_id(now), "node", "1", tzdata_version(), Routes(), 0, now, now)
        await web.app.store.run(nodes.announce, node)
        web.app._targets_by_kind["http"] = Receiver()
        web.app._targets_by_kind["push"] = Phones()
        span = {"now": format_instant(now), "hour": format_instant(now - timedelta(hours=1))}
        world = cls(web, ours, others, revoked, expired, {"node": node.id, **span})
        narrow = await web.ask("PUT", "/queues/narrow", {"concurrency": 5}, key=ours[Role.PLATFORM])
        assert narrow.status_code == 200, narrow.text
        await world._create_objects()
        return world

    async def mirror(self) -> World:
        """Return the world of the other tenant, whose objects have the same names."""
        names = {name: self.names[name] for name in ("node", "now", "hour")}
        world = World(self.web, self.other, {}, self.revoked, self.expired, names, tenant=THEIRS)
        await world._create_objects()
        return world

    async def _create_objects(self) -> None:
        for create in (
            self._renew_schedules, self._renew_calendar, self._renew_jobs, self._renew_key, self._renew_destinations,
            self._renew_user,
        ):  # fmt: skip
            await create("secret-1")
        await self._renew_push("phones")
        await self._renew_triggers("shifts")

    async def renew(self) -> None:
        """Recreate the objects of the tenant that the last call may have changed, so that the next call finds them."""
        self.count += 1
        name = f"secret-{self.count}"
        self.names["new"] = f"new-{self.count}"
        for prefixes, renew in (
            (("/schedules", "/backlogs"), self._renew_schedules), (("/calendars",), self._renew_calendar),
            (("/jobs", "/claims", "/dead-letters", "/operations"), self._renew_jobs), (("/keys",), self._renew_key),
            (("/secrets", "/targets", "/connections"), self._renew_destinations), (("/users",), self._renew_user),
            (PUSH, self._renew_push), (TRIGGERS, self._renew_triggers),
        ):  # fmt: skip
            if self.called.startswith(prefixes):
                await renew(name)

    async def _renew_schedules(self, name: str) -> None:
        editor = self.role[Role.EDITOR]
        for which in ("schedule", "skipping"):
            created = (await self.web.post("/schedules", {**NIGHTLY, "name": f"{name}-{which}"}, key=editor)).json()
            self.names[which] = created["id"]
        skipped = await self.web.post(f"/schedules/{self.names['skipping']}/skip-next", key=editor)
        self.names["next"] = created["nextFireAt"]
        assert skipped.status_code == 200, skipped.text

    async def _renew_calendar(self, name: str) -> None:
        body = {"holidays": ["2041-01-01"]}
        await self.web.ask("PUT", f"/calendars/{name}", body, key=self.role[Role.EDITOR])
        self.names["calendar"] = name

    async def _renew_jobs(self, name: str) -> None:
        """Create a job, attempted jobs, and an operation that matches none of them."""
        job = {"topic": "secret.topic", "runAt": LATER, "timezone": "UTC"}
        self.names["job"] = (await self.web.post("/jobs", job, key=self.role[Role.EDITOR])).json()["id"]
        self.names["dead"], self.names["held"], self.names["sent"] = await self.web.app.store.run(
            _create_attempted_jobs, self.tenant, self.web.app.clock.now()
        )
        self.names["token"] = attempt_token(SECRET, self.names["held"], 1)
        matches_none = {"filter": {"topic": f"none.{self.count}"}}
        created = await self.web.post("/dead-letters/retry", matches_none, key=self.role[Role.OPERATOR])
        self.names["operation"] = created.json()["id"]

    async def _renew_key(self, name: str) -> None:
        self.names["key"] = (await self.web.key("viewer", self.tenant)).split("_")[2]

    async def _renew_destinations(self, name: str) -> None:
        """Create a secret, a target and a connection."""
        for path, body in (
            ("/secrets", {"value": "v"}), ("/targets", HOOK), ("/connections", TOKENS),
        ):  # fmt: skip
            created = await self.web.post(path, {"name": name, **body}, key=self.role[Role.ADMIN])
            assert created.status_code == 201, created.text
        self.names |= {"secret": name, "target": name, "connection": name}

    async def _renew_user(self, name: str) -> None:
        """Create a user with a session."""
        now = self.web.app.clock.now()
        user = User(id=new_id(now), tenant_id=self.tenant, name=f"{name}-user", role=Role.VIEWER, created_at=now)
        session = Session(
            id=session_id(f"{name} {self.tenant}"), user_id=user.id, key_id=None, created_at=now, seen_at=now
        )
        await self.web.app.store.run(users.create_user, user, "no password")
        await self.web.app.store.run(users.create_session, session, None)
        self.names |= {"user": user.name, "session": session.id[:SESSION_ID_LENGTH]}

    async def _renew_triggers(self, name: str) -> None:
        """Create a source with a trigger, and one without."""
        admin, empty = self.role[Role.ADMIN], f"{name}-empty"
        source = await self.web.post("/sources", {"name": name}, key=admin)
        for path, body in (("/sources", {"name": empty}), ("/triggers", {"name": name, **TRIGGER, "source": name})):
            created = await self.web.post(path, body, key=admin)
            assert created.status_code == 201, created.text
        items = await self.web.post(f"/sources/{name}/items", ITEMS, key=admin)
        assert items.status_code == 200, items.text
        self.names |= {"source": name, "sourceId": source.json()["id"], "empty": empty, "trigger": name}

    async def _renew_push(self, name: str) -> None:
        """Create a device, an audience and campaigns."""
        editor, operator = self.role[Role.EDITOR], self.role[Role.OPERATOR]
        self.names |= {"audience": name, "segment": f"{name}-segment", "phone": f"handset-number-{self.count}"}
        created = await self.web.post("/devices", {"token": self.names["phone"]}, key=operator)
        self.names["device"] = created.json()["id"]
        source = AudienceSource.from_json(AUDIENCE)
        now = self.web.app.clock.now()
        await self.web.app.store.run(audiences.upsert_audience, self.tenant, name, source, None, now)
        await self.web.app.segments.put(self.names["segment"], {"platform": "ios"}, tenant_id=self.tenant)
        for which in ("campaign", "going", "stopped"):
            created = await self.web.post("/campaigns", {"title": "Hello", "sendAt": LATER, "name": name}, key=editor)
            self.names[which] = created.json()["id"]
        await self.web.post(f"/campaigns/{self.names['going']}/start", key=operator)
        await self.web.app.store.run(
            chunks.open_chunk, self.names["going"], 1, await self._job_of("going"), 1, self.web.app.clock.now()
        )
        await self.web.post(f"/campaigns/{self.names['stopped']}/stop", key=operator)

    async def _job_of(self, which: str) -> str:
        """Return the job that continues a campaign."""
        found = await self.web.app.campaigns.get(self.names[which], tenant_id=self.tenant)
        assert found.job_id is not None
        return found.job_id

    def filled(self, template: Any, names: dict[str, str] | None = None) -> Any:
        """Return a path or a body with its placeholders replaced."""
        if isinstance(template, dict):
            return {key: self.filled(value, names) for key, value in template.items()}
        if isinstance(template, str):
            for name, value in (names or self.names).items():
                template = template.replace(f"{{{name}}}", value)
        return template

    async def call(self, operation: Operation, key: str | None, *, more: Any = None, **headers: str) -> Any:
        """Call an operation as its entry specifies; `more` adds members to the body."""
        call = CALLS[operation.id]
        self.called = call.path
        self.count += 1
        self.names["new"] = f"new-{self.count}"
        body = self.filled(call.body)
        body = body if more is None else {**(body or {}), **more}
        path = self.filled(call.path)
        if operation.id == "streamEvents" and key is not None:
            return await read_stream_start(self.web, path, key, headers)
        return await self.web.ask(operation.method, path, body, key=key, **{**call.headers, **headers})


@dataclass
class StreamStart:
    """The first part of a streamed response."""

    status_code: int
    text: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    def json(self) -> Any:
        """Return the body of a problem."""
        return json.loads(self.text)


async def read_stream_start(web: Web, path: str, key: str, headers: dict[str, str]) -> StreamStart:
    """Request a stream and disconnect after its first part."""
    path, _, query = path.partition("?")
    all_headers = {"host": "127.0.0.1", "authorization": f"Bearer {key}", **headers}
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": PREFIX + path, "raw_path": (PREFIX + path).encode(), "query_string": query.encode(), "root_path": "",
        "headers": [(name.replace("_", "-").lower().encode(), value.encode()) for name, value in all_headers.items()],
        "client": ("127.0.0.1", 50_000), "server": ("127.0.0.1", 8700),
    }  # fmt: skip
    is_request_sent, hung_up, answer = False, asyncio.Event(), StreamStart(0)

    async def receive() -> dict[str, Any]:
        nonlocal is_request_sent
        if is_request_sent:
            await hung_up.wait()
            return {"type": "http.disconnect"}
        is_request_sent = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer.status_code = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answer.text += message.get("body", b"").decode()
            hung_up.set()

    await asyncio.wait_for(web.site(scope, receive, send), 10)
    return answer
