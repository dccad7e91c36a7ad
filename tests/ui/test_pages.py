"""Every page over real data: content, forms, permissions, and that nothing in the data becomes markup."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import insert, update

from tests.api.web import NIGHTLY
from timebell.dashboard import views
from timebell.ids import new_id
from timebell.store import schema
from timebell.store.transaction import Transaction

from .browser import Browser, Tags
from .hostile_data import fill_store, hostile_app, wait_until

Serve = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("phones")
SCRIPT_URL = "javascript:alert(1)//"


@asynccontextmanager
async def serve_filled(serve: Serve, url: str) -> AsyncIterator[tuple[Browser, dict[str, str]]]:
    """Serve a running app with hostile data; yield it with the paths of its pages."""
    app = hostile_app(url)
    async with serve(allow_local=True, app=app) as browser, app.running():
        yield browser, await fill_store(app, browser)


async def test_every_page_shows_real_data(serve: Serve, store_url: str) -> None:
    async with serve_filled(serve, store_url) as (browser, pages):
        texts = {}
        for name, path in pages.items():
            answer = await browser.get(path)
            assert answer.status_code == 200, (name, answer.text[:3000])
            texts[name] = html.unescape(answer.text)
        assert "evil.one is failing" in texts["overview"]
        assert "2 in 24 h" in texts["overview"]
        assert '<b class="n bad">2</b>' in texts["nodes"]  # the navigation shows the number of problems
        assert "paused" in texts["schedules"]
        assert "02:30" in texts["preview"]
        assert "does not exist" in texts["preview"]
        settings = ("If still running", "After an outage", "of the last 24 h", "at most 100")
        for word in ("EST", *settings, "Revision 1", "skipped", "Undo"):
            assert word in texts["schedule"], word
        assert "Paused" in texts["paused"]
        for word in ("Attempt 1 started", "Attempt 1 failed", "Dead", "Retry now", "ValueError"):
            assert word in texts["job"], word
        assert "2 jobs used up their attempts" in re.sub(r"\s+", " ", texts["dead"])
        assert "Nothing missed, nothing duplicated" in texts["audit"]
        assert "schedule.skip_next" in texts["audit-log"]
        assert "hook-secret" in texts["targets"]
        assert "hidden-value" not in "".join(texts.values())
        assert "fence 1" in texts["nodes"]
        assert "nightly" in texts["search"]
        for word in ("6 of 6 devices", "Accepted by FCM", "the-token-of-a-device"):
            assert word in re.sub(r"</?b>", "", texts["campaign"]), word
        for word in ("Asia/Seoul", "excluded", "in quiet hours"):
            assert word in texts["timetable"], word
        assert "6 of 6 devices will not receive it" in texts["stop"]
        assert "Awaiting approval" in texts["gated"]
        assert "approval: 6 recipients, more than 1" in texts["overview"]
        for word in ("15 min before", "1 day after", "Up to date", "Orphaned", "Token required"):
            assert word in texts["triggers"], word
        assert "Paused" in texts["trigger resting"]
        assert "due meanwhile are skipped; 2 planned jobs" in re.sub(r"\s+", " ", texts["trigger lost"])
        assert "needs a new token" in texts["overview"]


async def test_the_overview_describes_problems_in_sentences(serve: Serve) -> None:
    async with serve(allow_local=True) as browser:
        web, app = browser.web, browser.app
        ids = {}
        for name in ("late", "lost", "broken"):
            ids[name] = (await web.post("/api/v1/schedules", {**NIGHTLY, "name": name})).json()["id"]
        hook = {"name": "hook", "kind": "http", "options": {"url": "https://example.com/"}}
        assert (await web.post("/api/v1/targets", hook)).status_code == 201
        assert "No leader" in (await browser.get("/ui/")).text
        now = app.clock.now()
        hour = timedelta(hours=1)
        missed = {
            "id": new_id(now), "tenant_id": "default", "topic": "t", "schedule_id": ids["lost"], "kind": "planned",
            "scheduled_at": now - 3 * hour, "run_at": now - 3 * hour, "timezone": "UTC", "payload": "null",
            "queue": "default", "priority": 0, "serial": False, "state": "skipped", "reason": "missed", "attempt": 0,
            "attempts_used": 0, "created_at": now, "finished_at": now, "skipped_count": 3, "skipped_to": now - hour,
        }  # fmt: skip

        def create_problems(tx: Transaction) -> None:
            tx.execute(
                update(schema.schedules).where(schema.schedules.c.id == ids["late"]).values(next_fire_at=now - hour)
            )
            tx.execute(
                update(schema.schedules).where(schema.schedules.c.id == ids["broken"]).values(error="no such zone")
            )
            tx.execute(insert(schema.finished).values(**missed))
            tx.execute(update(schema.targets).values(disabled_at=now, disabled_reason="410 Gone"))

        await app.store.run(create_problems)

        async def overdue_is_shown() -> bool:
            return "late is overdue" in (await browser.get("/ui/")).text

        await wait_until(overdue_is_shown)
        text = (await browser.get("/ui/")).text
        for sentence in ("lost missed 3 runs", "broken errored", "no such zone", "Target hook is disabled"):
            assert sentence in text, sentence
        assert '<div class="v">3</div>' in text  # tile of missed runs


async def test_nothing_in_the_data_becomes_markup(serve_sqlite: Serve, sqlite_url: str) -> None:
    async with serve_filled(serve_sqlite, sqlite_url) as (browser, pages):
        more = {
            "q": f"/ui/schedules?q={SCRIPT_URL}<script>", "jobs?q": "/ui/jobs?q=status:<script>alert(1)</script>",
            "audit?": "/ui/audit?from=<script>x</script>&to=\"'>", "dead?": "/ui/dead-letters?topic=<b>x</b>&by=<i>",
            "next": "/ui/sign-in?next=%22%3E%3Cscript%3E", "did": "/ui/?did=<script>",
            "tz": "/ui/preview?timezone=<b>&when=<i>",
            "nowhere": "/ui/<script>alert(1)</script>", "tenant": "/ui/?tenant=<script>",
        }  # fmt: skip
        answers = {name: await browser.get(path) for name, path in {**pages, **more}.items()}
        tested = answers["test"] = await browser.submit("/ui/targets", "/ui/targets/orders/test")
        assert "Delivered" in tested.text
        for answer in (tested, answers["sent"]):
            assert "&lt;script&gt;alert" in answer.text  # the response of the receiver is shown as text
        for name, answer in answers.items():
            assert answer.status_code < 500, (name, answer.text)
            page = Tags(answer.text)
            scripts = page.find_all("script")
            assert all(str(tag["src"]).startswith("/ui/static/") for tag in scripts), name
            for tag, attributes in page.tags:
                assert tag not in ("img", "iframe", "object", "style", "base", "b2"), (name, tag)
                for attribute, value in attributes.items():
                    assert not attribute.startswith(("on", "hx-on")), (name, tag, attribute)
                    assert attribute != "style", (name, tag)
                    if attribute in ("href", "src", "action", "formaction"):
                        assert str(value).startswith(("/ui/", "#", "?", "data:image/svg+xml,")), (name, value)
            assert not [title for title in page.find_all("i") if "class" not in title], name
            assert "<script>alert" not in answer.text, name


async def test_pages_have_a_strict_content_security_policy_and_no_third_party_urls(
    serve_sqlite: Serve, sqlite_url: str
) -> None:
    async with serve_filled(serve_sqlite, sqlite_url) as (browser, pages):
        for path in (*pages.values(), "/ui/nowhere", "/ui/static/timebell.css", "/ui/static/timebell.js"):
            answer = await browser.get(path)
            policy = answer.headers["content-security-policy"]
            directives = (
                "default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'",
                "form-action 'self'", "base-uri 'none'", "frame-ancestors 'none'", "img-src 'self' data:",
            )  # fmt: skip
            assert all(directive in policy for directive in directives)
            assert "unsafe" not in policy
            assert "http" not in re.sub(r"https?://(www\.w3\.org|example\.com)", "", _urls(answer.text)), path


def _urls(text: str) -> str:
    """Return all URLs of a page or style sheet, separated by spaces."""
    return " ".join(re.findall(r"""(?:href|src|action|url)\s*[=(]\s*["']?([^"')\s]+)""", text))


async def test_forms_manage_a_schedule(serve: Serve, store_url: str) -> None:
    async with serve_filled(serve, store_url) as (browser, pages):
        page, api = pages["schedule"], pages["schedule"].replace("/ui", "/api/v1")

        async def reload() -> dict[str, Any]:
            return (await browser.web.get(api)).json()  # type: ignore[no-any-return]

        await browser.submit(page, f"{page}/pause", reason="night work")
        assert ((await reload())["enabled"], (await reload())["pauseReason"]) == (False, "night work")
        assert "night work" in (await browser.get(page)).text
        resumed = await browser.submit(page, f"{page}/resume")
        assert (await reload())["enabled"]
        assert "Resumed." in (await browser.get(resumed.headers["location"])).text
        (override,) = (await reload())["overrides"]
        await browser.submit(page, f"{page}/undo", at=override["at"])
        assert (await reload())["overrides"] == []
        await browser.submit(page, f"{page}/trigger")
        dry = await browser.submit(f"{page}/backfill", f"{page}/backfill", **{
            "from": "2026-01-01T00:00:00Z", "to": "2026-01-04T00:00:00Z"})  # fmt: skip
        assert "3 runs" in dry.text
        assert (
            await browser.submit(f"{page}/backfill", f"{page}/backfill", **{"from": "x", "to": "y"})
        ).status_code == 400
        conflict = await browser.submit(f"{page}/delete", f"{page}/delete", etag='"99"')
        assert conflict.status_code == 412
        etag = (await reload())["etag"]
        assert (await browser.submit(f"{page}/delete", f"{page}/delete", etag=etag)).status_code == 303
        assert (await browser.get(page)).status_code == 404
        log = await browser.web.get("/api/v1/audit-log?limit=20")
        assert {"schedule.pause", "schedule.resume", "schedule.undo", "schedule.delete"} <= {
            record["action"] for record in log.json()["items"]
        }


NEW = {
    "kind": "cron", "when": "0 9 * * 1-5", "timezone": "Asia/Seoul", "name": "digest", "topic": "push.digest",
    "payload": '{"to": "you"}', "overlapPolicy": "queue", "catchUp": "all", "catchUpWindow": "12h", "maxRetries": "2",
    "labels": "team=growth",
}  # fmt: skip


async def test_a_schedule_is_created_and_edited_in_a_form(serve: Serve) -> None:
    async with serve(allow_local=True) as browser:
        form = "/ui/schedules/new"
        for wrong, word in (
            ({"when": "61 * * * *"}, "61"), ({"timezone": "EST"}, "America/New_York"), ({"payload": "{"}, "JSON"),
            ({"payload": "NaN"}, "no such number"),
            ({"when": ""}, "no recurrence"), ({"labels": "team"}, "label"), ({"maxRetries": "many"}, "number"),
            ({"maxRetries": "9" * 30}, "number"), ({"maxRetries": "nan"}, "number"), ({"payload": "NaN"}, "JSON"),
            ({"payload": "9" * 30}, "64 bits"), ({"kind": "interval", "when": "9" * 30 + "d"}, "interval"),
        ):  # fmt: skip
            refused = await browser.submit(form, form, **{**NEW, **wrong})
            assert refused.status_code == 422
            assert word in refused.text, (word, refused.text)
            assert f'aria-describedby="{list(wrong)[-1]}-problem' in refused.text
            assert 'value="digest"' in refused.text  # the form keeps its input
        previewed = await browser.submit(form, form, **NEW, preview="1")
        assert (previewed.status_code, 'value="digest"' in previewed.text) == (200, True)
        assert (await browser.web.get("/api/v1/schedules")).json()["items"] == []
        created = await browser.submit(form, form, **NEW)
        page = created.headers["location"].split("?")[0]
        api = page.replace("/ui", "/api/v1")
        schedule = (await browser.web.get(api)).json()
        assert (schedule["cronExpression"], schedule["timezone"], schedule["payload"]) == (
            "0 9 * * 1-5",
            "Asia/Seoul",
            {"to": "you"},
        )
        assert (schedule["overlapPolicy"], schedule["catchUp"]["policy"], schedule["catchUp"]["window"]) == (
            "queue",
            "all",
            43_200,
        )
        assert (schedule["maxRetries"], schedule["labels"]) == (2, {"team": "growth"})
        # Fields that the form does not contain stay.
        changed = {"retry": {"attempts": 3, "backoff": {"type": "fixed", "delay": 7}}, "toleranceSeconds": 9}
        await browser.web.ask("PATCH", api, changed, if_match="*")
        edit = f"{page}/edit"
        fields = await _form_values(browser, edit)
        previewed = await browser.submit(edit, edit, **{**fields, "when": "0 10 * * 6", "preview": "1"})
        assert (previewed.status_code, "0 10 * * 6" in previewed.text) == (200, True)
        assert (await browser.web.get(api)).json()["cronExpression"] == "0 9 * * 1-5"
        assert (await browser.submit(edit, edit, **{**fields, "when": "0 10 * * 1-5", "labels": ""})).status_code == 303
        schedule = (await browser.web.get(api)).json()
        assert (schedule["cronExpression"], schedule["labels"], schedule["toleranceSeconds"]) == ("0 10 * * 1-5", {}, 9)
        assert (schedule["retry"]["backoff"]["delay"], schedule["overlapPolicy"]) == (7, "queue")
        # A concurrent change: the conflict is shown, and the resubmitted form wins.
        await browser.web.ask("PATCH", api, {"timezone": "Europe/Paris"}, if_match="*")
        conflict = await browser.submit(edit, edit, **{**fields, "when": "0 11 * * 1-5"})
        assert conflict.status_code == 412
        assert "Europe/Paris" in conflict.text
        assert "Keep mine" in conflict.text
        revision = re.search(r'name="revision" value="(\d+)"', conflict.text)
        etag = re.search(r'name="etag" value="([^"]+)"', conflict.text)
        assert revision is not None
        assert etag is not None
        mine = {
            **fields, "when": "0 11 * * 1-5", "timezone": "Europe/Paris",
            "revision": revision[1], "etag": html.unescape(etag[1]),
        }  # fmt: skip
        assert (await browser.submit(edit, edit, **mine)).status_code == 303
        schedule = (await browser.web.get(api)).json()
        assert (schedule["cronExpression"], schedule["timezone"]) == ("0 11 * * 1-5", "Europe/Paris")
        text = (await browser.get(page)).text
        assert "cronExpression" in text  # the list of revisions shows the changed fields
        await browser.submit(page, f"{page}/revert", revision="1")
        assert (await browser.web.get(api)).json()["cronExpression"] == "0 9 * * 1-5"


async def _form_values(browser: Browser, path: str) -> dict[str, str]:
    """Return the values of the fields of a form."""
    text = (await browser.get(path)).text
    page = Tags(text)
    values = {
        str(tag["name"]): tag.get("value") or ""
        for tag in page.find_all("input")
        if tag.get("name") not in (None, "_token", "q", "back", "tenant")
        and (tag.get("type") != "radio" or "checked" in tag)
    }
    areas = re.findall(r'<textarea[^>]* name="(\w+)"[^>]*>(.*?)</textarea>', text, re.S)
    selects = re.findall(r'<select[^>]* name="(\w+)".*?</select>', text, re.S)
    for name in selects:
        block = re.search(rf'<select[^>]* name="{name}".*?</select>', text, re.S)
        assert block is not None
        selected = re.search(r'<option value="(\w*)" selected', block[0])
        values[name] = selected[1] if selected else ""
    return values | {name: html.unescape(value) for name, value in areas}


async def test_dead_letters_are_counted_before_they_are_retried(serve: Serve, store_url: str) -> None:
    async with serve_filled(serve, store_url) as (browser, pages):
        page = pages["dead"]
        confirmation = await browser.submit(page, "/ui/dead-letters/retry", topic="evil.one")
        assert "Retry 2 jobs?" in confirmation.text
        assert (await browser.web.get("/api/v1/dead-letters?groupBy=topic")).json()["total"] == 2
        wrong = await browser.submit(page, "/ui/dead-letters/retry", sure="1", rate="much")
        assert wrong.status_code == 422
        started = await browser.submit(page, "/ui/dead-letters/retry", topic="evil.one", sure="1", rate="100")
        operation = started.headers["location"].split("?")[0]

        async def operation_completed() -> bool:
            return "completed</span>" in (await browser.get(operation, hx_request="true")).text

        await wait_until(operation_completed)
        assert "2 of 2" in (await browser.get(operation)).text

        async def dead_again() -> bool:
            return (await browser.web.get("/api/v1/dead-letters?groupBy=topic")).json()["total"] == 2  # type: ignore[no-any-return]

        await wait_until(dead_again)
        await browser.submit(page, "/ui/dead-letters/discard", sure="1")

        async def none_left() -> bool:
            return "No dead letters" in (await browser.get(page)).text

        await wait_until(none_left)


async def test_jobs_are_filtered_by_search_terms(serve_sqlite: Serve, sqlite_url: str) -> None:
    async with serve_filled(serve_sqlite, sqlite_url) as (browser, pages):
        failed = (await browser.get("/ui/jobs?q=status:failed topic:evil.one")).text
        assert failed.count("data-row") == 2
        assert (await browser.get("/ui/jobs?q=tea.ready")).text.count("data-row") == 2
        assert "No job matches" in (await browser.get("/ui/jobs?q=queue:none")).text
        wrong = await browser.get("/ui/jobs?q=colour:red")
        assert wrong.status_code == 422
        assert "status:" in wrong.text
        id_ = pages["job"].rsplit("/", 1)[1]
        assert (await browser.get(f"/ui/jobs?q={id_}")).headers["location"] == pages["job"]
        assert id_ in (await browser.get(f"/ui/search?q={id_}", hx_request="true")).text


async def test_actions_beyond_a_role_have_no_button_and_no_effect(serve_sqlite: Serve, sqlite_url: str) -> None:
    async with serve_filled(serve_sqlite, sqlite_url) as (browser, pages):
        await browser.create_user("vera", "viewer")
        await browser.sign_in("vera")
        for name in ("schedule", "job", "dead", "nodes", "targets", "schedules", "paused"):
            page = Tags((await browser.get(pages[name])).text)
            actions = {str(tag.get("action")) for tag in page.find_all("form") if tag.get("method") == "post"}
            assert actions <= {"/ui/shown", "/ui/sign-out"}, (name, actions)
        for name in ("schedule", "job", "dead"):
            assert "requires the operator role" in (await browser.get(pages[name])).text
        for name in ("new", "edit", "new trigger", "new campaign"):
            assert "Saving requires the editor role" in (await browser.get(pages[name])).text
        assert "yours is viewer" in (await browser.get("/ui/users")).text
        token = re.search(r'name="_token" value="(\w+)"', (await browser.get("/ui/")).text)
        assert token is not None
        refused = await browser.post_form(f"{pages['schedule']}/pause", {"_token": token[1]})
        assert refused.status_code == 403
        assert "ROLE_TOO_LOW" in refused.text
        assert (await browser.get("/ui/tenants")).status_code == 403
        assert (await browser.web.get(pages["schedule"].replace("/ui", "/api/v1"))).json()["enabled"]


async def test_a_page_that_takes_too_long_returns_an_error(
    serve_sqlite: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        assert (await browser.get("/ui/")).status_code == 200
        monkeypatch.setattr(views, "PAGE_TIMEOUT_SECONDS", 0.05)

        async def wait_forever(*_: object, **__: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(browser.app.store, "run", wait_forever)
        slow = await browser.get("/ui/jobs")
        assert slow.status_code == 503
        assert "PAGE_TOO_SLOW" in slow.text


async def test_other_tenants_see_none_of_the_data(serve_sqlite: Serve, sqlite_url: str) -> None:
    async with serve_filled(serve_sqlite, sqlite_url) as (browser, pages):
        await browser.create_user("ada", "admin", "acme")
        await browser.sign_in("acme/ada")
        for name in ("schedule", "job", "edit", "why"):
            assert (
                await browser.get(pages[name] + ("&" if "?" in pages[name] else "?") + "tenant=default")
            ).status_code == 404
        for name in ("overview", "schedules", "jobs", "dead", "audit", "targets", "search"):
            text = (await browser.get(pages[name])).text
            assert "evil.one" not in text, name
            assert "nightly &lt;" not in text, name


async def test_times_are_shown_in_the_chosen_zone(serve_sqlite: Serve, sqlite_url: str) -> None:
    async with serve_filled(serve_sqlite, sqlite_url) as (browser, pages):
        assert re.search(r"02:00:00 E[SD]T", (await browser.get(pages["schedule"])).text)
        await browser.submit("/ui/", "/ui/shown", zone="utc", back="/ui/")
        assert re.search(r"0[67]:00:00 UTC", (await browser.get(pages["schedule"])).text)
        browser.client.cookies.set("timebell-timezone", "Asia/Seoul")
        await browser.submit("/ui/", "/ui/shown", zone="mine", back="/ui/")
        assert re.search(r"1[56]:00:00 KST", (await browser.get(pages["schedule"])).text)
        browser.client.cookies.set("timebell-timezone", "<script>")
        assert '<script>"' not in (await browser.get(pages["schedule"])).text


@pytest.mark.parametrize(
    "name",
    [
        "../views.py",
        "..%2fviews.py",
        "vendor/manifest.json",
        "none.css",
        "%2e%2e/rendering.py",
        "%00.css",
        "x" * 300 + ".css",
    ],
)
async def test_only_static_files_of_the_package_are_served(serve_sqlite: Serve, name: str) -> None:
    async with serve_sqlite() as browser:
        assert (await browser.get(f"/ui/static/{name}")).status_code in (303, 404)
        assert (await browser.get("/ui/static/timebell.css?v=1")).headers["cache-control"].endswith("immutable")


async def test_the_first_page_with_its_assets_is_small(serve_sqlite: Serve, sqlite_url: str) -> None:
    async with serve_filled(serve_sqlite, sqlite_url) as (browser, _):
        first = await browser.get("/ui/")
        files = [str(tag["src"]) for tag in Tags(first.text).find_all("script")]
        files += [str(tag["href"]) for tag in Tags(first.text).find_all("link") if tag["rel"] == "stylesheet"]
        sizes = [len((await browser.get(path)).content) for path in files]
        fonts = [len((await browser.get(f"/ui/static/vendor/{name}.woff2")).content) for name in ("inter", "mono")]
        assert len(first.content) + sum(sizes) + sum(fonts) <= 200 * 1024
