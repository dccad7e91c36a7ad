"""Pages of the audit log and of the history of objects."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.api.web import NIGHTLY

Serve = Callable[..., Any]


async def test_the_audit_log_page_filters_and_links(serve: Serve) -> None:
    async with serve(allow_local=True) as browser:
        created = (await browser.web.post("/api/v1/schedules", NIGHTLY)).json()
        path = f"/api/v1/schedules/{created['id']}"
        await browser.web.ask("PATCH", path, {"timezone": "Asia/Seoul"}, if_match="*")
        await browser.web.ask("PATCH", path, {"timezone": "UTC"}, if_match='"1"')
        await browser.web.ask("PUT", "/api/v1/queues/narrow", {"concurrency": 5})
        page = (await browser.get("/ui/audit-log")).text
        text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
        for words in ("queue.put", "Refused REVISION_STALE", "New_York&#34; → &#34;Asia/Seoul", "127.0.0.1"):
            assert words in text, words
        assert f'<a href="/ui/schedules/{created["id"]}">nightly</a>' in page
        refused = (await browser.get("/ui/audit-log?outcome=refused")).text
        assert "REVISION_STALE" in refused
        assert "queue.put" not in refused
        assert "No record matches" in (await browser.get("/ui/audit-log?actor=nobody")).text
        wrong = await browser.get("/ui/audit-log?from=yesterday")
        assert (wrong.status_code, "INVALID_INSTANT" in wrong.text) == (422, True)
        exported = (await browser.get("/ui/audit-log/export?format=csv&subject=nightly")).text
        assert exported.count("schedule.") == 2
        history = (await browser.get(f"/ui/schedules/{created['id']}/history")).text
        assert history.count("schedule.") == 2
        assert "History of nightly" in history
        assert (
            f'href="/ui/schedules/{created["id"]}/history"'
            in (await browser.get(f"/ui/schedules/{created['id']}")).text
        )
        assert (await browser.get("/ui/schedules/none/history")).status_code == 404


async def test_only_admins_see_the_audit_log(serve_sqlite: Serve) -> None:
    async with serve_sqlite() as browser:
        await browser.create_user("vera", "viewer")
        await browser.sign_in("vera")
        assert "/ui/audit-log" not in (await browser.get("/ui/")).text
        assert (await browser.get("/ui/audit-log")).status_code == 403


async def test_sign_ins_and_their_failures_are_recorded(serve: Serve) -> None:
    async with serve() as browser:
        await browser.create_user()
        await browser.sign_in(name="my password in the wrong field", password="x")
        await browser.sign_in(password="wrong wrong wrong")
        await browser.sign_in()
        await browser.submit("/ui/", "/ui/sign-out")
        await browser.sign_in()
        page = (await browser.get("/ui/audit-log?action=session.*")).text
        assert page.count("WRONG_PASSWORD") == 2
        assert "session.end" in page
        assert "wrong field" not in page
        records = re.findall(r"session\.\w+", page)
        assert records == ["session.begin", "session.end", *["session.begin"] * 3]
