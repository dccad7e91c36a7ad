"""Every page over real data: what it shows, what its forms do, and that nothing in the data becomes markup."""

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

from .browsing import Browser, Tags
from .stock import app_of, stock, until

Make = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("phones")
LINKS = "javascript:alert(1)//"


@asynccontextmanager
async def stocked(make: Make, url: str) -> AsyncIterator[tuple[Browser, dict[str, str]]]:
    """A running app with everything in it, and the paths of its pages."""
    app = app_of(url)
    async with make(open_here=True, app=app) as browser, app.running():
        yield browser, await stock(app, browser)


async def test_every_page_shows_real_data(make: Make, store_url: str) -> None:
    async with stocked(make, store_url) as (browser, pages):
        seen = {}
        for name, path in pages.items():
            answer = await browser.look(path)
            assert answer.status_code == 200, (name, answer.text[:3000])
            seen[name] = html.unescape(answer.text)
        assert "evil.one is failing" in seen["overview"]
        assert "2 in 24 h" in seen["overview"]
        assert '<b class="n bad">2</b>' in seen["nodes"]  # where something waits, the navigation has a number
        assert "paused" in seen["schedules"]
        assert "02:30" in seen["preview"]
        assert "does not exist" in seen["preview"]
        for word in ("EST", "Overlap", "Catch-up", "window 24 h", "limit 100", "Revision 1", "left out", "Undo"):
            assert word in seen["schedule"], word
        assert "Paused" in seen["paused"]
        for word in ("Attempt 1 began", "Attempt 1 failed", "Dead", "Retry now", "ValueError"):
            assert word in seen["job"], word
        assert "2 jobs used up their attempts" in re.sub(r"\s+", " ", seen["dead"])
        assert "Nothing missed, nothing doubled" in seen["audit"]
        assert "schedule.skip_next" in seen["audit"]
        assert "hook-secret" in seen["targets"]
        assert "hidden-value" not in "".join(seen.values())
        assert "fence 1" in seen["nodes"]
        assert "nightly" in seen["search"]
        for word in ("6 of 6 devices", "Accepted by FCM", "the-token-of-a-device"):
            assert word in re.sub(r"</?b>", "", seen["campaign"]), word
        for word in ("Asia/Seoul", "left out", "it would wake them"):
            assert word in seen["timetable"], word
        assert "6 of 6 devices do not get it" in seen["stop"]
        assert "Waits for approval" in seen["gated"]
        assert "approval: 6 recipients, more than 1" in seen["overview"]
        for word in ("15 min before", "1 day after", "In step", "Orphaned", "Sign in again"):
            assert word in seen["triggers"], word
        assert "Paused" in seen["trigger resting"]
        assert "due meanwhile is skipped; 2 jobs are still to come" in seen["trigger lost"]
        assert "wants you to sign in again" in seen["overview"]


async def test_what_needs_somebody_is_said_in_sentences(make: Make) -> None:
    async with make(open_here=True) as browser:
        web, app = browser.web, browser.app
        ids = {}
        for name in ("late", "lost", "broken"):
            ids[name] = (await web.post("/api/v1/schedules", {**NIGHTLY, "name": name})).json()["id"]
        hook = {"name": "hook", "kind": "http", "options": {"url": "https://example.com/"}}
        assert (await web.post("/api/v1/targets", hook)).status_code == 201
        assert "Nobody leads" in (await browser.look("/ui/")).text
        now = app.clock.now()
        hour = timedelta(hours=1)
        missed = {
            "id": new_id(now), "tenant_id": "default", "topic": "t", "schedule_id": ids["lost"], "kind": "planned",
            "scheduled_at": now - 3 * hour, "run_at": now - 3 * hour, "timezone": "UTC", "payload": "null",
            "queue": "default", "priority": 0, "serial": False, "state": "skipped", "reason": "missed", "attempt": 0,
            "tries": 0, "created_at": now, "finished_at": now, "skipped_count": 3, "skipped_to": now - hour,
        }  # fmt: skip

        def spoil(tx: Transaction) -> None:
            tx.execute(
                update(schema.schedules).where(schema.schedules.c.id == ids["late"]).values(next_fire_at=now - hour)
            )
            tx.execute(
                update(schema.schedules).where(schema.schedules.c.id == ids["broken"]).values(fault="no such zone")
            )
            tx.execute(insert(schema.finished).values(**missed))
            tx.execute(update(schema.targets).values(disabled_at=now, disabled_reason="410 Gone"))

        await app.store.run(spoil)

        async def said() -> bool:
            return "late has not fired" in (await browser.look("/ui/")).text

        await until(said)
        text = (await browser.look("/ui/")).text
        for sentence in ("lost missed 3 fires", "broken is set aside", "no such zone", "The target hook is disabled"):
            assert sentence in text, sentence
        assert '<div class="v">3</div>' in text  # the tile of what was missed


async def test_s61_s65_nothing_in_the_data_becomes_markup(make_light: Make, sqlite_url: str) -> None:
    async with stocked(make_light, sqlite_url) as (browser, pages):
        more = {
            "q": f"/ui/schedules?q={LINKS}<script>", "jobs?q": "/ui/jobs?q=status:<script>alert(1)</script>",
            "audit?": "/ui/audit?from=<script>x</script>&to=\"'>", "dead?": "/ui/dead-letters?topic=<b>x</b>&by=<i>",
            "next": "/ui/sign-in?next=%22%3E%3Cscript%3E", "did": "/ui/?did=<script>",
            "tz": "/ui/preview?timezone=<b>&when=<i>",
            "nowhere": "/ui/<script>alert(1)</script>", "tenant": "/ui/?tenant=<script>",
        }  # fmt: skip
        answers = {name: await browser.look(path) for name, path in {**pages, **more}.items()}
        tested = answers["test"] = await browser.press("/ui/targets", "/ui/targets/orders/test")
        assert "It arrived" in tested.text
        for answer in (tested, answers["sent"]):
            assert "&lt;script&gt;alert" in answer.text  # what a receiver said is shown, as text
        for name, answer in answers.items():
            assert answer.status_code < 500, (name, answer.text)
            page = Tags(answer.text)
            scripts = page.named("script")
            assert all(str(one["src"]).startswith("/ui/static/") for one in scripts), name
            for tag, given in page.tags:
                assert tag not in ("img", "iframe", "object", "style", "base", "b2"), (name, tag)
                for attribute, value in given.items():
                    assert not attribute.startswith(("on", "hx-on")), (name, tag, attribute)
                    assert attribute != "style", (name, tag)
                    if attribute in ("href", "src", "action", "formaction"):
                        assert str(value).startswith(("/ui/", "#", "?", "data:image/svg+xml,")), (name, value)
            assert not [title for title in page.named("i") if "class" not in title], name
            assert "<script>alert" not in answer.text, name


async def test_s60_s66_a_strict_policy_and_no_third_party(make_light: Make, sqlite_url: str) -> None:
    async with stocked(make_light, sqlite_url) as (browser, pages):
        for path in (*pages.values(), "/ui/nowhere", "/ui/static/timebell.css", "/ui/static/timebell.js"):
            answer = await browser.look(path)
            policy = answer.headers["content-security-policy"]
            wanted = (
                "default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'",
                "form-action 'self'", "base-uri 'none'", "frame-ancestors 'none'", "img-src 'self' data:",
            )  # fmt: skip
            assert all(part in policy for part in wanted)
            assert "unsafe" not in policy
            assert "http" not in re.sub(r"https?://(www\.w3\.org|example\.com)", "", _links(answer.text)), path


def _links(text: str) -> str:
    return " ".join(re.findall(r"""(?:href|src|action|url)\s*[=(]\s*["']?([^"')\s]+)""", text))


async def test_forms_steer_a_schedule(make: Make, store_url: str) -> None:
    async with stocked(make, store_url) as (browser, pages):
        page, api = pages["schedule"], pages["schedule"].replace("/ui", "/api/v1")

        async def now() -> dict[str, Any]:
            return (await browser.web.get(api)).json()  # type: ignore[no-any-return]

        await browser.press(page, f"{page}/pause", reason="night work")
        assert ((await now())["enabled"], (await now())["pauseReason"]) == (False, "night work")
        assert "night work" in (await browser.look(page)).text
        done = await browser.press(page, f"{page}/resume")
        assert (await now())["enabled"]
        assert "Resumed." in (await browser.look(done.headers["location"])).text
        (override,) = (await now())["overrides"]
        await browser.press(page, f"{page}/undo", at=override["at"])
        assert (await now())["overrides"] == []
        await browser.press(page, f"{page}/trigger")
        dry = await browser.press(f"{page}/backfill", f"{page}/backfill", **{
            "from": "2026-01-01T00:00:00Z", "to": "2026-01-04T00:00:00Z"})  # fmt: skip
        assert "Would fire 3 times" in dry.text
        assert (
            await browser.press(f"{page}/backfill", f"{page}/backfill", **{"from": "x", "to": "y"})
        ).status_code == 400
        gone = await browser.press(f"{page}/delete", f"{page}/delete", revision="99")
        assert gone.status_code == 412
        revision = str((await now())["revision"])
        assert (await browser.press(f"{page}/delete", f"{page}/delete", revision=revision)).status_code == 303
        assert (await browser.look(page)).status_code == 404
        log = await browser.web.get("/api/v1/audit-log?limit=20")
        assert {"schedule.pause", "schedule.resume", "schedule.undo", "schedule.delete"} <= {
            one["action"] for one in log.json()["items"]
        }


NEW = {
    "kind": "cron", "when": "0 9 * * 1-5", "timezone": "Asia/Seoul", "name": "digest", "topic": "push.digest",
    "payload": '{"to": "you"}', "overlapPolicy": "queue", "catchUp": "all", "catchUpWindow": "12h", "maxRetries": "2",
    "labels": "team=growth",
}  # fmt: skip


async def test_a_schedule_is_made_and_changed_in_a_form(make: Make) -> None:
    async with make(open_here=True) as browser:
        form = "/ui/schedules/new"
        for wrong, word in (
            ({"when": "61 * * * *"}, "61"), ({"timezone": "EST"}, "America/New_York"), ({"payload": "{"}, "JSON"),
            ({"payload": "NaN"}, "no such number"),
            ({"when": ""}, "when it fires"), ({"labels": "team"}, "label"), ({"maxRetries": "many"}, "number"),
            ({"maxRetries": "9" * 30}, "number"), ({"maxRetries": "nan"}, "number"), ({"payload": "NaN"}, "JSON"),
            ({"payload": "9" * 30}, "64 bits"), ({"kind": "interval", "when": "9" * 30 + "d"}, "interval"),
        ):  # fmt: skip
            refused = await browser.press(form, form, **{**NEW, **wrong})
            assert refused.status_code == 422
            assert word in refused.text, (word, refused.text)
            assert 'value="digest"' in refused.text  # nothing typed is lost
        made = await browser.press(form, form, **NEW)
        page = made.headers["location"].split("?")[0]
        api = page.replace("/ui", "/api/v1")
        one = (await browser.web.get(api)).json()
        assert (one["cronExpression"], one["timezone"], one["payload"]) == ("0 9 * * 1-5", "Asia/Seoul", {"to": "you"})
        assert (one["overlapPolicy"], one["catchUp"]["policy"], one["catchUp"]["window"]) == ("queue", "all", 43_200)
        assert (one["maxRetries"], one["labels"]) == (2, {"team": "growth"})
        # What a form does not show stays.
        changed = {"retry": {"attempts": 3, "backoff": {"type": "fixed", "delay": 7}}, "toleranceSeconds": 9}
        await browser.web.ask("PATCH", api, changed, if_match="*")
        edit = f"{page}/edit"
        fields = await _fields(browser, edit)
        assert (await browser.press(edit, edit, **{**fields, "when": "0 10 * * 1-5", "labels": ""})).status_code == 303
        one = (await browser.web.get(api)).json()
        assert (one["cronExpression"], one["labels"], one["toleranceSeconds"]) == ("0 10 * * 1-5", {}, 9)
        assert (one["retry"]["backoff"]["delay"], one["overlapPolicy"]) == (7, "queue")
        # Somebody else was quicker: both are shown, and the second look wins.
        await browser.web.ask("PATCH", api, {"timezone": "Europe/Paris"}, if_match="*")
        late = await browser.press(edit, edit, **{**fields, "when": "0 11 * * 1-5"})
        assert late.status_code == 412
        assert "Europe/Paris" in late.text
        assert "Keep mine" in late.text
        revision = re.search(r'name="revision" value="(\d+)"', late.text)
        assert revision is not None
        mine = {**fields, "when": "0 11 * * 1-5", "timezone": "Europe/Paris", "revision": revision[1]}
        assert (await browser.press(edit, edit, **mine)).status_code == 303
        one = (await browser.web.get(api)).json()
        assert (one["cronExpression"], one["timezone"]) == ("0 11 * * 1-5", "Europe/Paris")
        seen = (await browser.look(page)).text
        assert "cronExpression" in seen  # the revisions say what changed
        await browser.press(page, f"{page}/revert", revision="1")
        assert (await browser.web.get(api)).json()["cronExpression"] == "0 9 * * 1-5"


async def _fields(browser: Browser, path: str) -> dict[str, str]:
    """What stands in a form."""
    text = (await browser.look(path)).text
    page = Tags(text)
    given = {
        str(one["name"]): one.get("value") or ""
        for one in page.named("input")
        if one.get("name") not in (None, "_token", "q", "back", "tenant")
        and (one.get("type") != "radio" or "checked" in one)
    }
    areas = re.findall(r'<textarea[^>]* name="(\w+)"[^>]*>(.*?)</textarea>', text, re.S)
    chosen = re.findall(r'<select[^>]* name="(\w+)".*?</select>', text, re.S)
    for name in chosen:
        block = re.search(rf'<select[^>]* name="{name}".*?</select>', text, re.S)
        assert block is not None
        picked = re.search(r'<option value="(\w*)" selected', block[0])
        given[name] = picked[1] if picked else ""
    return given | {name: html.unescape(value) for name, value in areas}


async def test_dead_letters_are_counted_before_they_are_replayed(make: Make, store_url: str) -> None:
    async with stocked(make, store_url) as (browser, pages):
        page = pages["dead"]
        asked = await browser.press(page, "/ui/dead-letters/replay", topic="evil.one")
        assert "Replay 2 jobs?" in asked.text
        assert (await browser.web.get("/api/v1/dead-letters?groupBy=topic")).json()["total"] == 2
        wrong = await browser.press(page, "/ui/dead-letters/replay", sure="1", rate="much")
        assert wrong.status_code == 422
        begun = await browser.press(page, "/ui/dead-letters/replay", topic="evil.one", sure="1", rate="100")
        operation = begun.headers["location"].split("?")[0]

        async def over() -> bool:
            return "completed</span>" in (await browser.look(operation, hx_request="true")).text

        await until(over)
        assert "2 of 2" in (await browser.look(operation)).text

        async def dead_again() -> bool:
            return (await browser.web.get("/api/v1/dead-letters?groupBy=topic")).json()["total"] == 2  # type: ignore[no-any-return]

        await until(dead_again)
        await browser.press(page, "/ui/dead-letters/discard", sure="1")

        async def gone() -> bool:
            return "No dead letters" in (await browser.look(page)).text

        await until(gone)


async def test_jobs_are_filtered_by_words(make_light: Make, sqlite_url: str) -> None:
    async with stocked(make_light, sqlite_url) as (browser, pages):
        failed = (await browser.look("/ui/jobs?q=status:failed topic:evil.one")).text
        assert failed.count("data-row") == 2
        assert (await browser.look("/ui/jobs?q=tea.ready")).text.count("data-row") == 2
        assert "No job matches" in (await browser.look("/ui/jobs?q=queue:none")).text
        wrong = await browser.look("/ui/jobs?q=colour:red")
        assert wrong.status_code == 422
        assert "status:" in wrong.text
        id_ = pages["job"].rsplit("/", 1)[1]
        assert (await browser.look(f"/ui/jobs?q={id_}")).headers["location"] == pages["job"]
        assert id_ in (await browser.look(f"/ui/search?q={id_}", hx_request="true")).text


async def test_what_a_role_may_not_has_no_button_and_no_effect(make_light: Make, sqlite_url: str) -> None:
    async with stocked(make_light, sqlite_url) as (browser, pages):
        await browser.user("vera", "viewer")
        await browser.sign_in("vera")
        for name in ("schedule", "job", "dead", "nodes", "targets", "schedules", "paused"):
            page = Tags((await browser.look(pages[name])).text)
            posts = {str(one.get("action")) for one in page.named("form") if one.get("method") == "post"}
            assert posts <= {"/ui/shown", "/ui/sign-out"}, (name, posts)
        for name in ("schedule", "job", "dead"):
            assert "the role operator, or more, can" in (await browser.look(pages[name])).text
        token = re.search(r'name="_token" value="(\w+)"', (await browser.look("/ui/")).text)
        assert token is not None
        refused = await browser.send(f"{pages['schedule']}/pause", {"_token": token[1]})
        assert refused.status_code == 403
        assert "ROLE_TOO_LOW" in refused.text
        assert (await browser.look("/ui/tenants")).status_code == 403
        assert (await browser.web.get(pages["schedule"].replace("/ui", "/api/v1"))).json()["enabled"]


async def test_a_page_that_takes_too_long_says_so(make_light: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_light(open_here=True) as browser:
        assert (await browser.look("/ui/")).status_code == 200
        monkeypatch.setattr(views, "PATIENCE", 0.05)

        async def never(*_: object, **__: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(browser.app.store, "run", never)
        slow = await browser.look("/ui/jobs")
        assert slow.status_code == 503
        assert "PAGE_TOO_SLOW" in slow.text


async def test_another_tenant_sees_nothing_of_it(make_light: Make, sqlite_url: str) -> None:
    async with stocked(make_light, sqlite_url) as (browser, pages):
        await browser.user("ada", "admin", "acme")
        await browser.sign_in("ada")
        for name in ("schedule", "job", "edit", "why"):
            assert (
                await browser.look(pages[name] + ("&" if "?" in pages[name] else "?") + "tenant=default")
            ).status_code == 404
        for name in ("overview", "schedules", "jobs", "dead", "audit", "targets", "search"):
            text = (await browser.look(pages[name])).text
            assert "evil.one" not in text, name
            assert "nightly &lt;" not in text, name


async def test_times_are_shown_in_the_zone_one_wants(make_light: Make, sqlite_url: str) -> None:
    async with stocked(make_light, sqlite_url) as (browser, pages):
        assert re.search(r"02:00:00 E[SD]T", (await browser.look(pages["schedule"])).text)
        await browser.press("/ui/", "/ui/shown", zone="utc", back="/ui/")
        assert re.search(r"0[67]:00:00 UTC", (await browser.look(pages["schedule"])).text)
        browser.client.cookies.set("timebell-timezone", "Asia/Seoul")
        await browser.press("/ui/", "/ui/shown", zone="mine", back="/ui/")
        assert re.search(r"1[56]:00:00 KST", (await browser.look(pages["schedule"])).text)
        browser.client.cookies.set("timebell-timezone", "<script>")
        assert '<script>"' not in (await browser.look(pages["schedule"])).text


@pytest.mark.parametrize(
    "name",
    [
        "../views.py",
        "..%2fviews.py",
        "vendor/manifest.json",
        "none.css",
        "%2e%2e/looks.py",
        "%00.css",
        "x" * 300 + ".css",
    ],
)
async def test_only_files_of_ours_are_served(make_light: Make, name: str) -> None:
    async with make_light() as browser:
        assert (await browser.look(f"/ui/static/{name}")).status_code in (303, 404)
        assert (await browser.look("/ui/static/timebell.css?v=1")).headers["cache-control"].endswith("immutable")


async def test_the_first_page_with_all_its_files_is_small(make_light: Make, sqlite_url: str) -> None:
    async with stocked(make_light, sqlite_url) as (browser, _):
        first = await browser.look("/ui/")
        files = [str(one["src"]) for one in Tags(first.text).named("script")]
        files += [str(one["href"]) for one in Tags(first.text).named("link") if one["rel"] == "stylesheet"]
        sizes = [len((await browser.look(path)).content) for path in files]
        fonts = [len((await browser.look(f"/ui/static/vendor/{name}.woff2")).content) for name in ("inter", "mono")]
        assert len(first.content) + sum(sizes) + sum(fonts) <= 200 * 1024
