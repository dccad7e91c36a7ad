"""Methods, conditional requests, query parameters and CORS."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from timebell import Timebell
from timebell.api import admission, server, v1

from .live import serve
from .web import NIGHTLY, is_problem, wait_until

Make = Callable[..., Any]


async def test_head_answers_like_get_without_the_body(make: Make) -> None:
    async with make() as web, serve(web) as live:
        created = await web.post("/schedules", NIGHTLY)
        path = f"/schedules/{created.json()['id']}"
        head, get = await web.ask("HEAD", path), await web.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert (head.headers["etag"], head.headers["content-length"]) == (get.headers["etag"], str(len(get.content)))
        is_head = await web.ask("HEAD", "/schedules/unknown")
        assert (is_head.status_code, is_head.content) == (404, b"")
        stream = await live.send(b"HEAD /api/v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert stream.split()[1] == b"200"
        assert stream.endswith(b"\r\n\r\n")


async def test_head_waits_for_its_turn_like_get(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_CONCURRENT_READS", 3)
    async with make() as web:
        reads = web.site.authenticator.capacity.reads
        async with reads.hold("default"):
            head = asyncio.create_task(web.ask("HEAD", "/schedules"))
            await wait_until(lambda: reads.waiting)
        assert (await head).status_code == 200


async def test_allow_lists_every_method_of_a_path(make: Make) -> None:
    async with make() as web:
        refused = await web.ask("PUT", "/schedules", {})
        is_problem(refused, 405, "METHOD_NOT_ALLOWED")
        assert refused.headers["allow"] == "GET, HEAD, OPTIONS, POST"
        options = await web.ask("OPTIONS", "/schedules/some-id")
        assert (options.status_code, options.headers["allow"]) == (204, "DELETE, GET, HEAD, OPTIONS, PATCH")
        is_problem(await web.ask("OPTIONS", "/unknown"), 404, "NOT_FOUND")
        options = await web.ask("OPTIONS", "/jobs/preview")  # not a job with this id
        assert options.headers["allow"] == "OPTIONS, POST"


async def test_numbers_and_booleans_are_not_converted_from_other_types(make: Make) -> None:
    async with make() as web:
        for field, value in (("enabled", 0), ("enabled", "true"), ("priority", False), ("priority", "5"),
                             ("timeoutSeconds", "60"), ("catchUp", {"limit": True})):  # fmt: skip
            refused = await web.post("/schedules", {**NIGHTLY, field: value})
            is_problem(refused, 422, "INVALID_FIELDS")
        assert (await web.post("/schedules", {**NIGHTLY, "priority": 5.0})).json()["priority"] == 5


async def test_a_slash_at_the_end_is_refused_instead_of_redirected(make: Make) -> None:
    async with make() as web:
        await web.post("/schedules", NIGHTLY)
        refused = is_problem(await web.get("/schedules/"), 404, "NOT_FOUND")
        assert refused["fix"] == "Remove the / at the end."
        assert "fix" not in is_problem(await web.get("/nothing"), 404, "NOT_FOUND")


async def test_an_unchanged_object_is_answered_with_304(make: Make) -> None:
    async with make() as web:
        created = await web.post("/schedules", NIGHTLY)
        path, tag = f"/schedules/{created.json()['id']}", created.headers["etag"]
        for sent in (tag, f"W/{tag}", f'"x", {tag}', "*"):
            same = await web.get(path, if_none_match=sent)
            assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag)
        await web.post(f"{path}/pause", {})
        assert (await web.get(path, if_none_match=tag)).status_code == 200


async def test_unknown_query_parameters_are_refused_with_a_suggestion(make: Make) -> None:
    async with make() as web:
        for path, fix in (
            ("/schedules?jobtype=x", "Did you mean jobType?"), ("/jobs?owner=x", "Did you mean ownerId?"),
            ("/tenants/default?x=1", "Valid parameters: tenant."),
        ):  # fmt: skip
            assert is_problem(await web.get(path), 422, "UNKNOWN_PARAMETER")["fix"] == fix
        is_problem(await web.post("/jobs?dryRun=true", {"topic": "a"}), 422, "UNKNOWN_PARAMETER")
        assert (await web.get("/jobs")).json()["items"] == []


@pytest.mark.parametrize("empty", ["", " "])
async def test_an_empty_time_zone_is_refused(make: Make, empty: str) -> None:
    async with make() as web:
        is_problem(await web.post("/schedules", {**NIGHTLY, "timezone": empty}), 422, "INVALID_TIMEZONE")
        job = {"topic": "a", "runAt": "2090-01-01T00:00:00Z", "timezone": empty}
        is_problem(await web.post("/jobs", job), 422, "INVALID_TIMEZONE")


async def test_rates_are_bounded(make: Make) -> None:
    async with make() as web:
        for rate in (5e-324, 0, -1, 1e300):
            is_problem(await web.post("/dead-letters/retry", {"filter": {}, "rate": rate}), 422, "INVALID_FIELDS")


async def test_pages_of_listed_origins_may_call_the_api(sqlite_url: str) -> None:
    app = Timebell(sqlite_url)
    app.settings = replace(app.settings, http_cors_origins="https://app.example.com, https://b.example.com")
    site = server.HttpApp(app, [v1.build_routes(app.features)], allow_local=True)
    transport = httpx2.ASGITransport(app=site, client=("127.0.0.1", 50_000))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8700") as client:
        for origin, allowed in (("https://app.example.com", True), ("https://evil.example.com", False)):
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST",
                     "Access-Control-Request-Headers": "authorization, if-match"}  # fmt: skip
            preflight = await client.options("/api/v1/schedules", headers=asked)
            assert (preflight.headers.get("access-control-allow-origin") == origin) is allowed
            assert preflight.is_success is allowed
            answer = await client.get("/api/v1/schedules", headers={"Origin": origin})
            assert answer.status_code == 200
            assert (answer.headers.get("access-control-allow-origin") == origin) is allowed
            assert "access-control-allow-credentials" not in answer.headers
    await app.close()


async def test_without_the_setting_no_origin_is_allowed(make: Make) -> None:
    async with make() as web:
        answer = await web.get("/schedules", origin="https://app.example.com")
        assert "access-control-allow-origin" not in answer.headers
