"""Sample data of the screenshots: schedules, campaigns, triggers and tenants of an invented company, as of now.

No engine runs: the rows are written as an engine would leave them, so that every picture shows every feature.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from math import sin
from typing import Any

from sqlalchemy import insert, update

from tests.api.web import Web
from timebell import Timebell
from timebell.features.campaigns.store.tables import campaigns, chunks, deliveries
from timebell.features.triggers.model.trigger import SOURCE_UNAUTHORIZED
from timebell.features.triggers.store import sources
from timebell.ids import new_id
from timebell.model.billing_months import billing_month
from timebell.model.operation import Operation, OperationKind
from timebell.model.routes import Routes
from timebell.store import schema
from timebell.store.cluster import nodes, operations, workers
from timebell.store.schema import months
from timebell.store.transaction import Transaction

from .browser import Browser

DAY, HOUR, MINUTE = timedelta(days=1), timedelta(hours=1), timedelta(minutes=1)
ERROR = "erp.example answered 503 Service Unavailable"
# Name, topic, recurrence, zone, last runs (f: failed, m: missed, s: skipped), duration of a run in seconds.
SCHEDULES: tuple[tuple[str, str, dict[str, Any], str, str, float], ...] = (
    ("Nightly billing run", "billing.close-day", {"cronExpression": "30 2 * * *"}, "America/New_York",
     "........f...s.......", 48.0),
    ("Morning digest push", "push.digest", {"cronExpression": "0 9 * * 1-5"}, "Asia/Seoul", "." * 20, 1.9),
    ("Shift reminders", "trigger.shift", {"cronExpression": "* * * * *"}, "America/Mexico_City", "." * 20, 0.4),
    ("Invoice sync to ERP", "erp.sync", {"cronExpression": "*/15 * * * *"}, "UTC", ".............f.ffff"[::-1], 10.0),
    ("Warehouse refresh", "dw.refresh", {"cronExpression": "15 */4 * * *"}, "Europe/Paris", "m.......m..........."
     , 31.0),
    ("Certificate expiry check", "infra.certs", {"cronExpression": "0 6 * * *"}, "UTC", "." * 20, 0.9),
    ("Weekly board report", "report.board", {"cronExpression": "0 17 * * 5"}, "Europe/London", "." * 12, 4.0),
    ("Agent heartbeat", "ai.heartbeat", {"interval": {"every": "PT1M"}}, "UTC", "." * 20, 0.02),
)  # fmt: skip
RUN_OUTCOMES = {
    ".": ("completed", None),
    "f": ("failed", None),
    "m": ("skipped", "missed"),
    "s": ("skipped", "overlap"),
}


async def fill_showcase(app: Timebell, browser: Browser) -> dict[str, str]:
    """Fill an empty store; return the paths of the pages by name."""
    web = browser.web
    now = app.clock.now()
    pages = await _create_campaigns(app, web, now) | await _create_triggers(app, web) | await _create_tenants(app, web)
    ids: dict[str, str] = {}
    runs: list[dict[str, Any]] = []
    for name, topic, recurrence, zone, outcomes, seconds in SCHEDULES:
        answer = await web.post("/api/v1/schedules", {
            "name": name, "jobType": topic, "timezone": zone, "jobPayload": {"ledger": "us-east"},
            **recurrence})  # fmt: skip
        assert answer.status_code == 201, answer.text
        ids[name] = answer.json()["id"]
        runs += [
            _finished_job(ids[name], topic, zone, now - DAY * (n + 0.3), mark, seconds + n % 5)
            for n, mark in enumerate(outcomes)
        ]
    report, billing = ids["Weekly board report"], ids["Nightly billing run"]
    await web.post(f"/api/v1/schedules/{report}/pause", {"reason": "no meeting until December"})
    for change in ({"timeoutSeconds": 60}, {"retry": {"attempts": 5, "backoff": {"type": "exponential", "delay": 5}}}):
        await web.ask("PATCH", f"/api/v1/schedules/{billing}", change, if_match="*")
    traffic = [
        _finished_job(None, topic, "UTC", now - n * 20 * (0.6 + 0.4 * sin(n / 30)) * timedelta(seconds=1), ".", seconds)
        for topic, seconds in (("trigger.shift", 0.4), ("push.digest", 1.9), ("ai.heartbeat", 0.02))
        for n in range(150)
    ]
    traffic += [
        _finished_job(None, "erp.sync", "UTC", now - HOUR * hour - 5 * timedelta(seconds=n),
             "f" if hour in (3, 9, 21) and n < 12 else ".", 9)
        for hour in range(1, 47) for n in range(int(250 + 150 * sin(hour / 8)))
    ]  # fmt: skip
    sync = ids["Invoice sync to ERP"]
    dead = [_finished_job(sync, "erp.sync", "UTC", now - 5 * MINUTE * n, "f", 10) for n in range(1, 8)]
    rows = sorted([*runs, *traffic, *dead], key=lambda row: row["run_at"])
    for row in rows:
        row["id"] = new_id(row["run_at"])
    await app.store.run(lambda tx: tx.execute(insert(schema.finished), rows))
    pending = (await web.post("/api/v1/jobs", {
        "topic": "reminder.task", "runAt": (now + 5 * HOUR).isoformat(), "payload": {"order": 42}})).json()  # fmt: skip
    await app.store.run(_create_nodes, now)
    await app.store.run(_create_operations, now)
    hook = {"name": "orders", "kind": "http", "options": {"url": "https://example.com/hooks/orders"}}
    await web.post("/api/v1/targets", hook)
    await web.post("/api/v1/secrets", {"name": "shop-token", "value": "x"})
    for name, role in (("ana", "admin"), ("ben", "operator"), ("chloe@example.com", "viewer")):
        user = {"name": name, "role": role, "password": "correct horse battery"}
        await web.post("/api/v1/users", user)
    await web.post("/api/v1/keys", {"name": "billing-service", "role": "editor", "networks": ["192.0.2.0/24"],
                                    "expiresAt": (now + 9 * DAY).isoformat()})  # fmt: skip
    await web.post("/api/v1/keys", {"name": "grafana", "role": "viewer", "scopes": ["jobs", "schedules"]})
    url, job = f"/ui/schedules/{billing}", dead[0]["id"]
    return {
        "overview": "/ui/", "schedules": "/ui/schedules", "schedule": url, "schedule-paused": f"/ui/schedules/{report}",
        "schedule-delete": f"{url}/delete", "schedule-backfill": f"{url}/backfill", "schedule-edit": f"{url}/edit",
        "new": "/ui/schedules/new?kind=cron&when=30+2+*+*+*&timezone=America/New_York&name=nightly-billing",
        "new-error": "/ui/schedules/new?kind=cron&when=61+2+*+*+*&timezone=EST", "why": await _why_path(web, billing),
        "jobs": "/ui/jobs", "jobs-empty": "/ui/jobs?q=topic:nothing.here", "job": f"/ui/jobs/{job}",
        "job-waiting": f"/ui/jobs/{pending['id']}", "dead-letters": "/ui/dead-letters",
        "dead-letters-group": "/ui/dead-letters?errorCode=DeliveryError", **pages,
        "audit-log": "/ui/audit-log", "users": "/ui/users", "user": "/ui/users/ana", "keys": "/ui/keys",
        "history": f"{url}/history", "runs": "/ui/runs", "forecast": "/ui/forecast", "upcoming": "/ui/upcoming",
        "audit": "/ui/audit", "targets": "/ui/targets", "nodes": "/ui/nodes",
        "search": "/ui/search?q=re", "sign-in": "/ui/sign-in", "not-there": "/ui/nowhere",
    }  # fmt: skip


def _finished_job(
    schedule: str | None, topic: str, zone: str, at: datetime, mark: str, seconds: float
) -> dict[str, Any]:
    """Return a row of the finished table; `mark` is a key of RUN_OUTCOMES."""
    state, reason = RUN_OUTCOMES[mark]
    ran = mark in ".f"
    started = at + timedelta(milliseconds=20 + at.microsecond % 60)
    return {
        "tenant_id": "default", "topic": topic, "kind": "planned" if schedule else "once",
        "schedule_id": schedule, "scheduled_at": at, "run_at": at, "timezone": zone, "payload": '{"ledger":"us-east"}',
        "queue": "default", "priority": 0, "serial": False, "state": state, "reason": reason,
        "attempt": (5 if mark == "f" else 1) if ran else 0, "attempts_used": (5 if mark == "f" else 1) if ran else 0,
        "created_at": at - MINUTE, "started_at": started if ran else None,
        "finished_at": started + timedelta(seconds=seconds) if ran else at + MINUTE,
        "error_code": "DeliveryError" if mark == "f" else None, "error": ERROR if mark == "f" else None,
        "skipped_count": 1, "skipped_to": None if ran else at,
    }  # fmt: skip


def _create_nodes(tx: Transaction, now: datetime) -> None:
    """Write four nodes, one with older zone data and one that drains, two workers, and a period without a leader."""
    began, ids = now - 6 * DAY, [new_id(now - 6 * DAY + n * MINUTE) for n in range(4)]
    states = (  # name, tzdata, running jobs, clock offset in ms
        ("node-a", "2026f", 6, 4),
        ("node-b", "2026f", 11, -2),
        ("node-c", "2026a", 0, 7),
        ("node-d", "2026f", 2, 1),
    )
    leaderships = ((1, 17 * HOUR, 17 * HOUR), (2, 16 * HOUR, 40 * MINUTE), (0, 33 * MINUTE, 0 * MINUTE))
    for node, acquired_ago, last_heartbeat_ago in leaderships:
        name, tzdata, running, ahead = states[node]
        load = {"slots": 16, "running": running, "clock_ahead": ahead}
        nodes.announce(tx, nodes.Node(ids[node], name, "0.1.0", tzdata, Routes(all_topics=True), 1, began,
                                      now - last_heartbeat_ago, **load))  # fmt: skip
        nodes.acquire_lease(tx, ids[node], nodes.get_lease(tx), now - acquired_ago)
        if node == 1:
            tx.execute(update(schema.leaderships).values(ended_at=now - 16 * HOUR, resigned=True))
    for id_, (name, tzdata, running, ahead) in zip(ids, states, strict=True):
        nodes.announce(tx, nodes.Node(
            id_, name, "0.1.0", tzdata, Routes(all_topics=True), 2, began, now, slots=16, running=running,
            clock_ahead=ahead,
        ))  # fmt: skip
    nodes.request_drain(tx, ids[3])
    for name, topics, queues in (("mail-7f3a-412", ("mail.",), None), ("reports-1", (), ("reports", "exports"))):
        routes = Routes(prefixes=frozenset(topics), all_topics=not topics, tenant_id="default")
        id_ = workers.worker_id("default", name)
        workers.announce(tx, workers.RemoteWorker(id_, name, routes, queues, 20, began, now), None)
    workers.request_drain(tx, id_)


def _create_operations(tx: Transaction, now: datetime) -> None:
    retry = Operation(
        id=new_id(now), tenant_id="default", kind=OperationKind.RETRY, total=9, done=6,
        created_at=now - 3 * MINUTE / 60,
        updated_at=now, created_by="dana", spec={"which": {"topic": "erp.sync"}, "rate": 2},
    )  # fmt: skip
    scan = Operation(
        id=new_id(now), tenant_id="default", kind=OperationKind.SCAN, total=11_000, done=311, skipped=7_829,
        created_at=now - MINUTE, updated_at=now, spec={"trigger": "x", "name": "launch-date"},
    )  # fmt: skip
    for operation in (retry, scan):
        operations.create(tx, operation)
        operations_table = schema.operations
        values = {
            "done": operation.done, "skipped": operation.skipped, "total": operation.total, "updated_at": now,
        }  # fmt: skip
        tx.execute(update(operations_table).where(operations_table.c.id == operation.id).values(**values))


async def _create_campaigns(app: Timebell, web: Web, now: datetime) -> dict[str, str]:
    """Create a running campaign to two million devices, and planned, gated and stopped ones."""
    zones = ("Asia/Seoul", "Europe/Paris", "America/New_York", "Asia/Tokyo")
    await app.devices.register_many([
        {"token": f"token-of-a-phone-{n:04}", "user_id": f"user-{n}", "timezone": zones[n % 4], "marketing_on": True,
         "platform": "android" if n % 3 else "ios"} for n in range(120)
    ])  # fmt: skip
    message = {
        "title": "오늘의 말씀", "body": "Good morning", "data": {"bible_code": 3, "chapter": 22}, "marketing": True,
        "fields": {"rename": {"bible_code": "bibleCode"}}, "filters": {"marketingOnOff": True}, "chunkSize": 500,
    }  # fmt: skip
    bodies = {
        "campaign": {"name": "Morning digest, Korea", "chunkDelayMs": "adaptive"},
        "campaign-planned": {"name": "New year, where you are", "localTime": f"{now.year + 1}-01-01T09:00:00",
                             "quietHours": {"start": "21:00", "end": "08:00"},
                             "canary": {"size": 1000, "maxErrorRate": 0.05}},
        "campaign-gated": {"name": "All customers, once", "approveAbove": 100},
        "campaign-stopped": {"name": "Autumn sale", "chunkSize": 20},
        "campaign-waiting": {"name": "Good morning, everywhere", "quietHours": {"start": "21:00", "end": "08:00"}},
        "campaign-paused": {"name": "Flash sale"},
        "campaign-partly": {"name": "New features"},
        "campaign-failed": {"name": "Welcome back"},
        "campaign-sent": {
            "name": "Spring collection", "holdOut": 0.1, "trackOpens": True,
            "variants": [{"name": "A"}, {"name": "B", "title": "{{attributes.name|Hello}}, spring is here"}],
        },
        "campaign-archived": {"name": "Last year's sale"},
    }  # fmt: skip
    ids = {}
    for name, body in bodies.items():
        answer = await web.post("/api/v1/campaigns", {**message, **body, "timezone": "Asia/Seoul"})
        assert answer.status_code == 201, answer.text
        ids[name] = answer.json()["id"]
    began = now - 135 * timedelta(seconds=1)
    running = {
        "state": "running",
        "started_at": began,
        "cutoff": now,
        "next_chunk": 2596,
        "opened": 1_297_500,
        "accepted": 1_281_022,
        "refused": 14_871,
        "unsent": 0,
        "expected": 2_113_904,
        "open_chunks": 8,
        "lanes": "[]",
    }
    rows = [
        {"campaign_id": ids["campaign"], "number": n, "job_id": new_id(now), "size": 500, "attempt": 1,
         "state": "sending" if n > 2587 else "waiting" if n in (484, 1600, 2241) else "done", "started_at": began,
         "accepted": 494, "refused": 6, "ended_at": None if n > 2587 else began + n * timedelta(seconds=0.052)}
        for n in range(1, 2596)
    ]  # fmt: skip
    stopped_chunks = [
        {"campaign_id": ids["campaign-stopped"], "number": n, "job_id": new_id(now), "size": 20, "attempt": 1,
         "state": "done", "started_at": now - DAY, "accepted": 19, "refused": 1, "unsent": int(n == 2),
         "ended_at": now - DAY} for n in range(1, 4)
    ]  # fmt: skip
    stopped = {
        "state": "stopped",
        "reason": "the price was wrong",
        "started_at": now - DAY,
        "ended_at": now - DAY,
        "opened": 60,
        "accepted": 56,
        "refused": 3,
        "unsent": 1,
        "next_chunk": 4,
        "expected": 120,
        "lanes": "[]",
    }
    ended = {"started_at": now - 3 * HOUR, "ended_at": now - 2 * HOUR, "cutoff": now - 3 * HOUR, "lanes": "[]",
             "all_opened": True, "expected": 120, "registered": 120, "opened": 120}  # fmt: skip
    lanes = [
        {"zone": zone, "at": (now + wait).isoformat(), "done": not wait}
        for zone, wait in (("Asia/Seoul", 0 * HOUR), ("Europe/Paris", 7 * HOUR), ("America/New_York", 13 * HOUR))
    ]
    others = {
        "campaign-waiting": {"state": "running", "started_at": now - HOUR, "cutoff": now - HOUR, "expected": 120,
                             "opened": 30, "accepted": 29, "refused": 1, "lanes": json.dumps(lanes)},
        "campaign-paused": {"state": "paused", "reason": "errors: 61 of the last 100 refused (INVALID_ARGUMENT 61)",
                            "started_at": now - HOUR, "cutoff": now - HOUR, "expected": 120, "opened": 100,
                            "accepted": 39, "refused": 61, "lanes": "[]"},
        "campaign-partly": {**ended, "state": "partly_sent", "accepted": 101, "refused": 4, "unknown": 12, "unsent": 3,
                            "reason": "12 LEASE_LOST, 3 UNAVAILABLE"},
        "campaign-failed": {**ended, "state": "failed", "refused": 120, "reason": "120 SENDER_ID_MISMATCH"},
        "campaign-sent": {**ended, "state": "completed", "opened": 108, "accepted": 107, "refused": 1,
                          "excluded": '{"holdOut":12}'},
        "campaign-archived": {**ended, "state": "completed", "accepted": 120, "archived_at": now - HOUR},
    }  # fmt: skip
    recipients = [
        {"campaign_id": ids["campaign-sent"], "recipient": new_id(now), "chunk": 1, "code": None,
         "state": "held" if n < 12 else "refused" if n == 12 else "accepted",
         "variant": None if n < 12 else "AB"[n % 2],
         "opened_at": now if n > 60 + n % 2 * 20 else None} for n in range(120)
    ]  # fmt: skip
    gated = {"state": "paused", "reason": "approval: 120 recipients, more than 100", "expected": 120}

    def write(tx: Transaction) -> None:
        for name, values in (("campaign", running), ("campaign-stopped", stopped), ("campaign-gated", gated)):
            tx.execute(update(campaigns).where(campaigns.c.id == ids[name]).values(**values))
        tx.execute(insert(chunks), [*rows])
        tx.execute(insert(chunks), [*stopped_chunks])
        tx.execute(insert(deliveries), [*recipients])
        for name, values in others.items():
            tx.execute(update(campaigns).where(campaigns.c.id == ids[name]).values(**values))

    await app.store.run(write)
    await app.segments.put("Korea, Android", {"timezone": "Asia/Seoul", "platform": "android"}, created_by="mira")
    await app.segments.put("Everyone else", {"not": {"segment": "Korea, Android"}}, created_by="mira")
    pages = {name: f"/ui/campaigns/{id_}" for name, id_ in ids.items()}
    return pages | {
        "campaigns": "/ui/campaigns",
        "campaign-new": "/ui/new/campaign?title=Good+morning&when=local&at=2027-01-01T09:00&timezone=Asia/Seoul",
        "campaign-stop": f"{pages['campaign']}/stop",
        "campaign-left": f"{pages['campaign-planned']}/people?state=remaining",
        "campaigns-archived": "/ui/campaigns?state=archived",
        "segments": "/ui/segments",
        "segment": "/ui/segments/Everyone%20else",
        "devices": "/ui/devices?field1=platform&op1=is&value1=ios",
        "device": f"/ui/devices/{(await app.devices.list(limit=1)).items[0].id}",
        "campaign-timetable": f"{pages['campaign-planned']}/timetable",
    }  # fmt: skip


async def _create_triggers(app: Timebell, web: Web) -> dict[str, str]:
    """Create triggers that are up to date, orphaned, paused, or need a new token."""
    triggers: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
        ("shift-soon", "duty-schedules", "shift.start-15", {"column": "start_at", "offsets": ["-15m"],
         "condition": [{"field": "checked_in", "op": "eq", "value": False}], "recipients": "user_id"}),
        ("launch-date", "product-launches", "board.launch", {"column": "launch"}),
        ("contract-renewal", "contracts-eu", "board.renewal", {"column": "ends", "offsets": ["-30d", "-1d"]}),
        ("trial-ends", "accounts", "trial.end", {"column": "trial_ends_at"}),
        ("birthday", "people", "people.birthday", {"column": "born", "offsets": ["+1w"]}),
    )  # fmt: skip
    for name, source, topic, body in triggers:
        created = (await web.post("/api/v1/sources", {"name": source})).json()
        answer = await web.post(
            "/api/v1/triggers", {"name": name, "source": source, "topic": topic, "timezone": "Asia/Seoul", **body}
        )
        assert answer.status_code == 201, answer.text
        items = [
            {"key": str(8100 + n), "version": 1,
             "fields": {body["column"]: f"2040-01-{n + 1:02}T09:00:00", "user_id": f"u{n}", "state": "active"}}
            for n in range(12)
        ]  # fmt: skip
        await web.post(f"/api/v1/sources/{source}/items", {"items": items})
        now = app.clock.now()
        if source == "contracts-eu":
            await app.store.run(sources.set_orphaned, created["id"], "Board orphaned (404)", now - 6 * HOUR)
        if source == "accounts":
            error = "monday.com rejects the token: re-authorization required."
            await app.store.run(sources.record_failure, created["id"], error, SOURCE_UNAUTHORIZED)
        if source == "duty-schedules":
            await app.store.run(sources.record_full_scan, created["id"], None, now - 3 * MINUTE / 60)
    complete_scans = update(schema.operations).values(state="completed", done=12, total=12, finished_at=now)
    await app.store.run(lambda tx: tx.execute(complete_scans))
    await web.post("/api/v1/triggers/birthday/pause", {"reason": "the list is being cleaned up"})
    return {
        "triggers": "/ui/triggers",
        "source-new": "/ui/new/source?kind=monday&dailyCalls=1000",
        "trigger-new": "/ui/new/trigger?source=duty-schedules&column=start_at&recipients=user_id&timezone=Asia/Seoul",
        "trigger": "/ui/triggers/shift-soon",
        "trigger-orphaned": "/ui/triggers/contract-renewal",
        "trigger-sign-in": "/ui/triggers/trial-ends",
    }


async def _create_tenants(app: Timebell, web: Web) -> dict[str, str]:
    now = app.clock.now()
    tenants = (("growth", 5000, 4812, 50), ("finance", None, 0, 20), ("ops", 500, 500, 5), ("ai", None, 0, 100))
    for name, limit, _, rate in tenants:
        limits = {"requestsPerSecond": rate} | ({"jobsPerMonth": limit} if limit else {})
        await web.post("/api/v1/tenants", {"id": name, "limits": limits})
    usage = [
        {"tenant_id": name, "month": billing_month(now, None), "used": used} for name, _, used, _ in tenants if used
    ]
    await app.store.run(lambda tx: tx.execute(insert(months), usage))
    return {"tenants": "/ui/tenants"}


async def _why_path(web: Web, schedule: str) -> str:
    body = (await web.get(f"/api/v1/schedules/{schedule}")).json()
    return f"/ui/schedules/{schedule}/why?at={body['nextFireAt']}"
