"""ETag and If-Match: a change based on an old representation is refused, for every resource."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from timebell.api import v1
from timebell.tenancy.roles import Role

from .calls import CALLS, OURS, World, operations
from .web import NIGHTLY, Web, is_problem

Make = Callable[..., Any]
URL = "https://example.com/in"


async def test_a_stale_edit_never_undoes_a_pause(make: Make) -> None:
    async with make() as web:
        created = await web.post("/schedules", NIGHTLY)
        path, before = f"/schedules/{created.json()['id']}", created.headers["etag"]
        paused = await web.post(f"{path}/pause", {"reason": "incident 42"})
        assert paused.headers["etag"] != before
        for method, where, body in (
            ("PATCH", path, {"enabled": True}),
            ("PUT", "/schedules/by-name/nightly", NIGHTLY),
            ("DELETE", path, None),
            ("POST", f"{path}/resume", {}),
        ):
            is_problem(await web.ask(method, where, body, if_match=before), 412, "REVISION_STALE")
        now = await web.get(path)
        assert (now.json()["enabled"], now.json()["pauseReason"]) == (False, "incident 42")
        assert now.json()["etag"] == now.headers["etag"] == paused.headers["etag"]
        resumed = await web.post(f"{path}/resume", {}, if_match=now.headers["etag"])
        assert resumed.json()["enabled"]
        again = await web.post(f"{path}/pause", {"reason": "incident 43"})
        assert again.headers["etag"] not in (before, paused.headers["etag"])


async def test_skipping_an_occurrence_changes_the_etag_of_a_schedule(make: Make) -> None:
    async with make() as web:
        created = await web.post("/schedules", NIGHTLY)
        skipped = await web.post(f"/schedules/{created.json()['id']}/skip-next")
        assert skipped.headers["etag"] != created.headers["etag"]


async def _target(web: Web) -> tuple[str, str, Any, Any]:
    body = {"kind": "http", "options": {"url": URL}}
    return "PUT", "/targets/orders", body, {**body, "options": {"url": f"{URL}/2"}}


async def _tenant(web: Web) -> tuple[str, str, Any, Any]:
    await web.post("/tenants", {"id": "acme"})
    return "PATCH", "/tenants/acme", {"limits": {"schedules": 5}}, {"limits": {"schedules": 6}}


async def _queue(web: Web) -> tuple[str, str, Any, Any]:
    return "PUT", "/queues/mail", {"concurrency": 5}, {"concurrency": 6}


async def _calendar(web: Web) -> tuple[str, str, Any, Any]:
    return "PUT", "/calendars/shop", {"holidays": ["2027-01-01"]}, {"holidays": ["2027-01-02"]}


async def _segment(web: Web) -> tuple[str, str, Any, Any]:
    return "PUT", "/segments/runners", {"filters": {"platform": "ios"}}, {"filters": {"platform": "android"}}


@pytest.mark.parametrize("resource", [_target, _tenant, _queue, _calendar, _segment])
async def test_a_stale_write_is_refused_and_one_of_two_concurrent_writes_wins(
    make: Make, resource: Callable[[Web], Any]
) -> None:
    async with make() as web:
        method, path, first, second = await resource(web)
        assert (await web.ask(method, path, first)).is_success
        old = (await web.get(path)).headers["etag"]
        changed = await web.ask(method, path, second, if_match=old)
        assert changed.is_success, changed.text
        current = await web.get(path)
        assert current.headers["etag"] != old
        is_problem(await web.ask(method, path, first, if_match=old), 412, "REVISION_STALE")
        assert (await web.get(path)).json() == current.json()
        writes = [web.ask(method, path, first, if_match=current.headers["etag"]) for _ in range(4)]
        statuses = sorted(response.status_code for response in await asyncio.gather(*writes))
        # The writes are equal: a repeated one may find that it changes nothing. But the first one invalidates the ETag.
        assert statuses == [200, 412, 412, 412]
        assert (await web.ask(method, path, second, if_match="*")).is_success


async def test_pausing_a_queue_and_disabling_a_target_change_their_etags(make: Make) -> None:
    async with make() as web:
        before = (await web.ask("PUT", "/queues/mail", {"concurrency": 5})).headers["etag"]
        await web.post("/queues/mail/pause", {"reason": "incident 42"})
        is_problem(await web.ask("PUT", "/queues/mail", {}, if_match=before), 412, "REVISION_STALE")
        is_problem(await web.post("/queues/mail/resume", if_match=before), 412, "REVISION_STALE")
        await web.ask("PUT", "/targets/orders", {"kind": "http", "options": {"url": URL}})
        before = (await web.get("/targets/orders")).headers["etag"]
        await web.post("/targets/orders/rotate-secret", {})
        for method, path in (("DELETE", "/targets/orders"), ("POST", "/targets/orders/enable")):
            is_problem(await web.ask(method, path, if_match=before), 412, "REVISION_STALE")


async def test_pausing_a_trigger_changes_its_etag(make: Make) -> None:
    async with make() as web:
        await web.post("/sources", {"name": "shifts", "kind": "webhook"})
        body = {"source": "shifts", "column": "starts_at", "topic": "t", "timezone": "UTC"}
        created = await web.post("/triggers", {"name": "soon", **body})
        assert created.status_code == 201, created.text
        before = created.headers["etag"]
        await web.post("/triggers/soon/pause", {"reason": "incident 42"})
        is_problem(await web.ask("PUT", "/triggers/soon", body, if_match=before), 412, "REVISION_STALE")
        is_problem(await web.ask("DELETE", "/triggers/soon", if_match=before), 412, "REVISION_STALE")
        is_problem(await web.post("/triggers/soon/resume", if_match=before), 412, "REVISION_STALE")
        assert (await web.get("/triggers/soon")).json()["enabled"] is False


async def test_replacing_a_source_or_a_trigger_requires_its_tag(make: Make) -> None:
    async with make() as web:
        source = {"kind": "webhook"}
        trigger = {"source": "shifts", "column": "starts_at", "topic": "t", "timezone": "UTC"}
        for path, body in (("/sources/shifts", source), ("/triggers/soon", trigger)):
            assert (await web.ask("PUT", path, body)).is_success
            is_problem(await web.ask("PUT", path, body), 428, "REVISION_MISSING")
            for sent in ("*", f'"x", {(await web.get(path)).headers["etag"]}'):
                assert (await web.ask("PUT", path, body, if_match=sent)).is_success


async def test_a_stale_write_does_not_create_a_deleted_object_again(make: Make) -> None:
    async with make() as web:
        for path, body in (
            ("/schedules/by-name/nightly", NIGHTLY), ("/targets/orders", {"kind": "http", "options": {"url": URL}}),
            ("/calendars/shop", {"holidays": ["2027-01-01"]}), ("/segments/runners", {"filters": {"platform": "ios"}}),
            ("/sources/shifts", {"kind": "webhook"}),
            ("/triggers/soon", {"source": "shifts", "column": "starts_at", "topic": "t", "timezone": "UTC"}),
        ):  # fmt: skip
            is_problem(await web.ask("PUT", path, body, if_match='"1"'), 412, "REVISION_STALE")
            assert (await web.ask("PUT", path, body, if_match="*")).is_success


async def test_replacing_a_shared_calendar_by_an_own_one_checks_the_tag_of_the_shared_one(make: Make) -> None:
    async with make() as web:
        await web.ask("PUT", "/calendars/shop", {"holidays": ["2027-01-01"]})
        own, acme = {"holidays": ["2027-01-02"]}, {"timebell_tenant": "acme"}
        shared = (await web.get("/calendars/shop", **acme)).headers["etag"]
        await web.ask("PUT", "/calendars/shop", {"holidays": ["2027-01-03"]})
        is_problem(await web.ask("PUT", "/calendars/shop", own, if_match=shared, **acme), 412, "REVISION_STALE")
        shared = (await web.get("/calendars/shop", **acme)).headers["etag"]
        assert (await web.ask("PUT", "/calendars/shop", own, if_match=shared, **acme)).is_success


async def test_stopping_a_campaign_changes_its_etag(make: Make) -> None:
    async with make() as web:
        body = {"title": "t", "body": "b", "sendAt": "2090-01-01T00:00:00Z", "timezone": "UTC"}
        created = await web.post("/campaigns", body)
        assert created.status_code == 201, created.text
        before = created.headers["etag"]
        assert (await web.post(f"/campaigns/{created.json()['id']}/stop", {})).status_code == 200
        stale = await web.ask("PATCH", f"/campaigns/{created.json()['id']}", {"title": "u"}, if_match=before)
        is_problem(stale, 412, "REVISION_STALE")


WITHOUT_IF_MATCH = {  # what they change has no fields that someone could have read before
    "revokeKey", "deleteDevice", "endUserSessions", "endUserSession",
}  # fmt: skip


async def test_every_operation_that_changes_an_object_refuses_a_stale_tag(make: Make) -> None:
    async with make(open_here=False) as web:
        world, paths, refused = await World.make(web), v1.build_openapi()["paths"], set[str]()
        for operation in operations():
            parameters = paths[operation.path][operation.method.lower()].get("parameters", [])
            takes_tag = any(parameter["name"] == "If-Match" for parameter in parameters)
            is_change = operation.method in ("PUT", "PATCH", "DELETE")
            assert takes_tag or not is_change or operation.id in WITHOUT_IF_MATCH, operation.id
            if takes_tag and "{new}" not in CALLS[operation.id].path:
                key = world.role[Role.PLATFORM]
                stale = await world.call(operation, key, timebell_tenant=OURS, if_match='"stale"')
                assert (stale.status_code, stale.json().get("code")) == (412, "REVISION_STALE"), operation.id
                refused.add(operation.id)
        assert len(refused) > 30
