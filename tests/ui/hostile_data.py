"""App with schedules, jobs, campaigns and triggers of every kind, all of whose texts contain markup."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from urllib.parse import quote

from tests.api.web import NIGHTLY, Web
from timebell import Arrived, Retry, Timebell
from timebell.features.triggers.model.trigger import SOURCE_UNAUTHORIZED
from timebell.features.triggers.store import sources
from timebell.recurrence.instants import format_instant
from timebell.targets.base import Delivery, Outcome

from .browser import Browser

EVIL = "<script>alert('x')</script>\"'><img src=x onerror=alert(1)>&{{7*7}}${7*7}"

FCM: dict[str, Any] = {}  # settings of apps that send to a fake FCM


class Receiver:
    """HTTP target that accepts every delivery and responds with markup."""

    kind = "http"

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        return options

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        return Outcome.ok({"status": 200, "body": EVIL, "headers": {"x-evil": EVIL}})

    async def close(self) -> None:
        """Do nothing; there are no connections."""


def hostile_app(url: str) -> Timebell:
    """Return an app with one handler that succeeds and one that fails."""
    app = Timebell(url)
    app.settings = replace(app.settings, **FCM)
    app._targets_by_kind["http"] = Receiver()

    @app.on("tea.ready")
    async def ready(event: Arrived) -> dict[str, str]:
        return {"text": EVIL}

    @app.on("evil.one", retry=Retry(attempts=1))
    async def evil(event: Arrived) -> None:
        raise ValueError(EVIL)

    return app


async def wait_until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(120):
        while not await condition():
            await asyncio.sleep(0.02)


async def fill_store(app: Timebell, browser: Browser) -> dict[str, str]:
    """Fill the store of a running app; return the paths of its pages by name."""
    web = browser.web
    body = {
        **NIGHTLY, "name": f"nightly {EVIL}"[:190], "description": EVIL, "jobPayload": {EVIL: EVIL},
        "labels": {"team": EVIL[:60]}, "jobType": "evil.one", "maxRetries": 0,
    }  # fmt: skip
    schedule = (await web.post("/api/v1/schedules", body)).json()
    id_ = schedule["id"]
    assert (await web.post(f"/api/v1/schedules/{id_}/trigger")).status_code == 201
    assert (await web.post(f"/api/v1/schedules/{id_}/skip-next")).status_code == 200
    paused = (await web.post("/api/v1/schedules", {**NIGHTLY, "name": "paused one"})).json()["id"]
    await web.post(f"/api/v1/schedules/{paused}/pause", {"reason": EVIL})

    async def job(**body: Any) -> dict[str, Any]:
        answer = await web.post("/api/v1/jobs", {"timezone": "America/New_York", **body})
        assert answer.status_code == 201, answer.text
        return answer.json()  # type: ignore[no-any-return]

    def soon() -> str:
        return format_instant(app.clock.now() + timedelta(seconds=0.2))

    done = await job(topic="tea.ready", runAt=soon(), payload={"x": EVIL}, key="k" + EVIL[:50])
    dead = await job(topic="evil.one", runAt=soon(), metadata={"note": EVIL})
    await job(topic="tea.ready", runAt="2040-01-01T00:00:00Z")
    user = {"name": "eve", "role": "viewer", "password": "correct horse battery"}
    assert (await web.post("/api/v1/users", user)).status_code == 201
    await web.post("/api/v1/secrets", {"name": "hook-secret", "value": "hidden-value"})
    await web.post("/api/v1/targets", {"name": "orders", "kind": "http", "options": {
        "url": "https://example.com/", "headers": {"x-note": EVIL[:80].replace("\n", "")}}})  # fmt: skip

    sent = await job(topic="orders.sent", runAt=soon(), target="orders")

    campaign_ids, trigger_pages = await _create_campaigns(app, web), await _create_triggers(app, web)

    async def everything_ended() -> bool:
        jobs = [(await web.get(f"/api/v1/jobs/{each['id']}")).json() for each in (done, dead, sent)]
        dead_letters = (await web.get("/api/v1/dead-letters")).json()["items"]
        states = [
            (await web.get(f"/api/v1/campaigns/{campaign_ids[name]}")).json()["state"] for name in ("campaign", "gated")
        ]
        scans = (await web.get("/api/v1/operations?kind=scan&state=running")).json()["items"]
        leads = app.service is not None and app.service.leader.fence is not None
        return (
            all(job["completedAt"] for job in jobs) and len(dead_letters) == 2 and states == ["completed", "paused"]
            and not scans and leads
        )  # fmt: skip

    await wait_until(everything_ended)
    at = schedule["nextFireAt"]
    pages = {
        "overview": "/ui/", "runs": "/ui/runs", "schedules": "/ui/schedules", "new": "/ui/schedules/new",
        "schedule": f"/ui/schedules/{id_}", "edit": f"/ui/schedules/{id_}/edit",
        "paused": f"/ui/schedules/{paused}",
        "backfill": f"/ui/schedules/{id_}/backfill", "delete": f"/ui/schedules/{id_}/delete",
        "why": f"/ui/schedules/{id_}/why?at={at}", "jobs": "/ui/jobs", "done": f"/ui/jobs/{done['id']}",
        "job": f"/ui/jobs/{dead['id']}", "mend": f"/ui/jobs/{dead['id']}/edit", "dead": "/ui/dead-letters",
        "deadgroup": "/ui/dead-letters?errorCode=ValueError",
        "audit-log": "/ui/audit-log", "users": "/ui/users", "user": "/ui/users/eve", "keys": "/ui/keys",
        "history": f"/ui/schedules/{id_}/history",
        "deadtopic": "/ui/dead-letters?by=topic", "forecast": "/ui/forecast", "upcoming": "/ui/upcoming",
        "audit": "/ui/audit",
        "targets": "/ui/targets", "new target": "/ui/targets/new", "target": "/ui/targets/orders/edit",
        "sent": f"/ui/jobs/{sent['id']}",
        "tenants": "/ui/tenants", "nodes": "/ui/nodes", "search": "/ui/search?q=night",
        "new source": f"/ui/new/source?kind=sql&changes={quote(EVIL[:40])}",
        "dry run": f"/ui/triggers/instep/preview?rows={quote(json.dumps([{'start_at': EVIL}]))}",
        "new trigger": "/ui/new/trigger", "new campaign": "/ui/new/campaign",
        "triggered": f"/ui/new/trigger/preview?source=instep&column=start_at&condition={quote(EVIL[:40])}%20empty",
        "sending": f"/ui/new/campaign/preview?title={quote(EVIL)}&when=local&at=2040-01-01T09:00&timezone=Asia/Seoul",
        "preview": "/ui/preview?kind=cron&when=30+2+*+*+*&timezone=America/New_York",
    }  # fmt: skip
    return pages | {name: f"/ui/campaigns/{id_}" for name, id_ in campaign_ids.items()} | trigger_pages | {
        "campaigns": "/ui/campaigns", "triggers": "/ui/triggers",
        "timetable": f"/ui/campaigns/{campaign_ids['planned']}/timetable",
        "people": f"/ui/campaigns/{campaign_ids['campaign']}/people",
        "stop": f"/ui/campaigns/{campaign_ids['planned']}/stop",
        "left": f"/ui/campaigns/{campaign_ids['planned']}/people?state=remaining",
    }  # fmt: skip


async def _create_campaigns(app: Timebell, web: Web) -> dict[str, str]:
    """Create a finished, a planned and a gated campaign; return their ids by name."""
    zones = ("Asia/Seoul", "Europe/Paris", "America/New_York")
    await app.devices.register_many([
        {"token": f"token-of-a-phone-{n:04}", "user_id": f"{n} {EVIL}", "timezone": zones[n % 3]} for n in range(6)
    ])  # fmt: skip
    text = EVIL.replace("{{7*7}}", "")  # an unknown placeholder is refused
    message = {"title": text, "body": text, "data": {"bible_code": text}, "fields": {"rename": {"bible_code": "<b>x"}}}
    bodies = {
        "campaign": {"name": f"sent {EVIL}", "chunkSize": 2, "chunkDelayMs": 0},
        "planned": {"name": EVIL, "localTime": "2040-01-01T09:00:00", "canary": {"size": 2, "maxErrorRate": 0.5},
                    "quietHours": {"start": "21:00", "end": "10:00", "then": "skip"}, "collapseKey": EVIL},
        "gated": {"name": "too many", "approveAbove": 1},
    }  # fmt: skip
    ids = {}
    for name, body in bodies.items():
        answer = await web.post("/api/v1/campaigns", {**message, **body})
        assert answer.status_code == 201, answer.text
        ids[name] = answer.json()["id"]
    return ids


async def _create_triggers(app: Timebell, web: Web) -> dict[str, str]:
    """Create triggers that are up to date, paused, orphaned or need a new token; return the paths of their pages."""
    pages = {}
    for name, more in (("instep", {}), ("resting", {}), ("lost", {}), ("locked", {})):
        source = (await web.post("/api/v1/sources", {"name": name})).json()
        body = {
            "name": name, "source": name, "column": "start_at", "topic": "shift.soon", "offsets": ["-15m", "+1d"],
            "timezone": "Asia/Seoul", "condition": [{"field": "state", "op": "ne", "value": EVIL}],
            "recipients": "who", "payload": {"say": EVIL}, "metadata": {"note": EVIL}, **more,
        }  # fmt: skip
        assert (await web.post("/api/v1/triggers", body)).status_code == 201
        items = [{"key": EVIL, "version": 1, "fields": {"start_at": "2040-01-01T00:00:00", "who": EVIL, "x": EVIL}}]
        assert (await web.post(f"/api/v1/sources/{name}/items", {"items": items})).status_code == 200
        if name == "lost":
            await app.store.run(sources.set_orphaned, source["id"], f"Board orphaned (404) {EVIL}", app.clock.now())
        if name == "locked":
            await app.store.run(
                sources.record_failure, source["id"], f"re-authorization required {EVIL}", SOURCE_UNAUTHORIZED
            )
        pages[f"trigger {name}"] = f"/ui/triggers/{name}"
    await web.post("/api/v1/triggers/resting/pause", {"reason": EVIL})
    return pages
