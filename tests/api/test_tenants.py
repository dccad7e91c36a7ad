"""Tenants: visibility, limits that also hold for concurrent requests, and usage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from timebell.api import bulk
from timebell.api.authentication import Authenticator
from timebell.settings import Settings
from timebell.tenancy.limits import LimitReached, Limits

from .web import NIGHTLY, is_problem

Make = Callable[..., Any]


async def test_the_platform_creates_tenants_and_an_admin_sees_only_its_own(make: Make) -> None:
    async with make(open_here=False) as web:
        everywhere, ours = await web.key("platform", None), await web.key("admin", "ours")
        created = await web.post("/tenants", {"id": "acme", "limits": {"schedules": 3}}, key=everywhere)
        assert created.status_code == 201
        assert created.json()["limits"] == {
            "schedules": 3, "pendingJobs": None, "payloadBytesPerDay": None, "requestsPerSecond": None,
            "jobsAtOnce": None, "startsPerMinute": None,
            "jobsPerMonth": None,
        }  # fmt: skip
        is_problem(await web.post("/tenants", {"id": "acme"}, key=everywhere), 409, "TENANT_EXISTS")
        is_problem(await web.post("/tenants", {"id": "x"}, key=ours), 403, "ROLE_TOO_LOW")
        changed = await web.ask(
            "PATCH", "/tenants/acme", {"limits": {"pendingJobs": 9, "schedules": None}}, key=everywhere
        )
        assert (changed.json()["limits"]["pendingJobs"], changed.json()["limits"]["schedules"]) == (9, None)
        is_problem(await web.ask("PATCH", "/tenants/ours", {"limits": {"schedules": 9}}, key=ours), 403, "ROLE_TOO_LOW")
        assert {one["id"] for one in (await web.get("/tenants", key=everywhere)).json()["items"]} >= {"acme", "ours"}
        assert [one["id"] for one in (await web.get("/tenants", key=ours)).json()["items"]] == ["ours"]
        assert (await web.get("/tenants/ours", key=ours)).status_code == 200
        for path in ("/tenants/acme", "/tenants/acme/usage", "/tenants/unknown"):
            is_problem(await web.get(path, key=ours), 404, "TENANT_NOT_FOUND")
        is_problem(await web.post("/tenants", {"id": "a/b"}, key=everywhere), 422, "INVALID_FIELDS")
        is_problem(
            await web.post("/tenants", {"id": "b", "limits": {"schedules": 0}}, key=everywhere), 422, "INVALID_FIELDS"
        )


async def _limited(web: Any, **limits: int) -> str:
    everywhere = await web.key("platform", None)
    await web.post("/tenants", {"id": "acme", "limits": limits}, key=everywhere)
    return str(await web.key("admin", "acme"))


async def test_schedules_are_limited(make: Make) -> None:
    async with make(open_here=False) as web:
        key = await _limited(web, schedules=3)
        created = await asyncio.gather(*(
            web.post("/schedules", {**NIGHTLY, "name": f"s{number}"}, key=key) for number in range(9)
        ))  # fmt: skip
        assert sorted(one.status_code for one in created) == [201] * 3 + [429] * 6
        refused = next(one for one in created if one.status_code == 429)
        body = is_problem(refused, 429, "LIMIT_REACHED")
        assert body["limit"] == {"name": "schedules", "max": 3}
        assert int(refused.headers["retry-after"]) > 0
        items = (await web.get("/schedules", key=key)).json()["items"]
        assert len(items) == 3
        same = await web.ask(
            "PUT",
            f"/schedules/by-name/{items[0]['name']}",
            {**NIGHTLY, "name": items[0]["name"]},
            key=key,
            if_match="*",
        )
        assert same.status_code == 200
        is_problem(
            await web.ask("PUT", "/schedules/by-name/more", {**NIGHTLY, "name": "more"}, key=key), 429, "LIMIT_REACHED"
        )
        await web.ask("DELETE", f"/schedules/{items[0]['id']}", key=key, if_match="*")
        assert (await web.post("/schedules", {**NIGHTLY, "name": "free"}, key=key)).status_code == 201


async def test_pending_jobs_are_limited(make: Make) -> None:
    async with make(open_here=False) as web:
        key = await _limited(web, pendingJobs=2)
        id_ = (await web.post("/schedules", {**NIGHTLY, "overlapPolicy": "allow"}, key=key)).json()["id"]
        codes = [(await web.post(f"/schedules/{id_}/trigger", key=key)).status_code for _ in range(4)]
        assert codes == [201, 201, 429, 429]
        used = (await web.get("/tenants/acme/usage", key=key)).json()
        assert (used["pendingJobs"], used["schedules"], used["limits"]["pendingJobs"]) == (2, 1, 2)


async def test_a_delayed_request_does_not_reset_the_rate_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    at = [100.0]
    app: Any = SimpleNamespace(clock=SimpleNamespace(monotonic=lambda: at[0]), settings=Settings())
    caller: Any = SimpleNamespace(tenant_id="acme")
    authenticator, answers = Authenticator(app, allow_local=True), asyncio.Event()

    async def slow(tenant_id: str) -> Limits:
        await answers.wait()
        return Limits(requests_per_second=3)

    async def quick(tenant_id: str) -> Limits:
        return Limits(requests_per_second=3)

    monkeypatch.setattr(authenticator, "tenant_limits", slow)
    waited = asyncio.create_task(authenticator.throttle(caller))
    await asyncio.sleep(0)
    at[0] += 60
    monkeypatch.setattr(authenticator, "tenant_limits", quick)
    await authenticator.throttle(caller)  # the later request is admitted first
    answers.set()
    await waited
    await authenticator.throttle(caller)
    with pytest.raises(LimitReached):
        await authenticator.throttle(caller)


async def test_payload_bytes_per_day_are_limited(make: Make) -> None:
    async with make(open_here=False) as web:
        key = await _limited(web, payloadBytesPerDay=2000)
        big = {**NIGHTLY, "jobPayload": {"text": "x" * 1200}}
        assert (await web.post("/schedules", big, key=key)).status_code == 201
        refused = await web.post("/schedules", {**big, "name": "second"}, key=key)
        assert is_problem(refused, 429, "LIMIT_REACHED")["limit"]["name"] == "payloadBytesPerDay"
        assert 0 < int(refused.headers["retry-after"]) <= 86_400
        assert len((await web.get("/schedules", key=key)).json()["items"]) == 1
        used = (await web.get("/tenants/acme/usage", key=key)).json()
        assert 1200 < used["payloadBytes"] <= 2000
        assert used["requests"] == 4


async def test_limits_of_concurrent_jobs_and_starts_are_returned(make: Make) -> None:
    async with make(open_here=False) as web:
        key = await _limited(web, jobsAtOnce=2, startsPerMinute=9)
        fetched = (await web.get("/tenants/acme", key=key)).json()["limits"]
        assert (fetched["jobsAtOnce"], fetched["startsPerMinute"]) == (2, 9)


async def test_requests_per_second_are_limited(make: Make) -> None:
    async with make(open_here=False) as web:
        key = await _limited(web, requestsPerSecond=3)
        answers = await asyncio.gather(*(web.get("/schedules", key=key) for _ in range(40)))
        refused = next(one for one in answers if one.status_code == 429)
        body = is_problem(refused, 429, "LIMIT_REACHED")
        assert body["limit"] == {"name": "requestsPerSecond", "max": 3}
        assert refused.headers["retry-after"] == "1"
        passed = next(one for one in answers if one.status_code == 200)
        assert passed.headers["ratelimit-policy"] == '"default";q=3;w=1'


async def test_an_import_fails_at_the_limit_of_pending_jobs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "BATCH_SIZE", 10)
    async with make(open_here=False) as web:
        key = await _limited(web, pendingJobs=25)
        lines = b"".join(
            b'{"topic": "t", "timezone": "UTC", "runAt": "2040-01-01T00:00:%02dZ"}\n' % at for at in range(40)
        )
        ended = (await web.ask("POST", "/jobs/bulk", lines, key=key, content_type="application/x-ndjson")).json()
        assert (ended["state"], ended["progress"]["done"]) == ("failed", 20)
        used = (await web.get("/tenants/acme/usage", key=key)).json()
        assert used["pendingJobs"] == 20
        one = {"topic": "t", "timezone": "UTC", "runAt": "2040-01-01T00:00:00Z"}
        assert [(await web.post("/jobs", one, key=key)).status_code for _ in range(6)] == [201] * 5 + [429]
