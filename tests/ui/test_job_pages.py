"""Job pages over finished jobs: payloads are edited, several jobs are changed together, lists are exported."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import insert

from tests.api.web import NIGHTLY
from timebell import Arrived, Retry, Timebell, csv_rows
from timebell.dashboard import exports
from timebell.dashboard.rendering import has_live_scripts
from timebell.ids import new_id
from timebell.store import schema

from .browser import Browser, Tags
from .hostile_data import wait_until

Serve = Callable[..., Any]
LATER = "2040-01-01T00:00:00Z"
HOUR = timedelta(hours=1)


def finished_job(at: datetime, state: str = "failed", **columns: Any) -> dict[str, Any]:
    """Return a row of the finished table for a job that finished_job at `at`."""
    return {
        "id": new_id(at), "tenant_id": "default", "topic": "erp.sync", "kind": "once", "scheduled_at": at, "run_at": at,
        "timezone": "UTC", "payload": '{"to": "eve"}', "queue": "default", "priority": 0, "serial": False,
        "state": state, "attempt": 1, "attempts_used": 1, "created_at": at, "started_at": at, "finished_at": at,
        "error_code": "ValueError" if state == "failed" else None, "schedule_id": None, "error": None,
        "manual_retries": 0, "reason": None,
    } | columns  # fmt: skip


async def insert_finished(browser: Browser, *rows: dict[str, Any]) -> None:
    """Insert these rows into the finished table."""
    await browser.app.open()
    await browser.app.store.run(lambda tx: tx.execute(insert(schema.finished), list(rows)))


def plain_text(html: str) -> str:
    """Return the text of a page without tags."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


async def test_the_payload_of_a_failed_job_is_edited_in_a_form(serve: Serve) -> None:
    async with serve(allow_local=True) as browser:
        failed = finished_job(browser.app.clock.now() - HOUR)
        await insert_finished(browser, failed)
        page = f"/ui/jobs/{failed['id']}"
        assert f'href="{page}/edit"' in (await browser.get(page)).text
        assert "eve" in (await browser.get(f"{page}/edit")).text
        for wrong, word in (('{"to": "ana"', "JSON"), ("NaN", "no such number"), ("1" * 40, "64 bits")):
            refused = await browser.submit(f"{page}/edit", f"{page}/edit", payload=wrong)
            assert refused.status_code == 422
            assert word in refused.text
            assert wrong.replace('"', "&#34;") in refused.text  # the form keeps its input
        edited = await browser.submit(f"{page}/edit", f"{page}/edit", payload='{"to": "ana"}')
        assert edited.status_code == 303
        new = edited.headers["location"].split("?")[0]
        shown = (await browser.get(edited.headers["location"])).text
        assert "with the edited payload" in shown
        assert "&#34;ana&#34;" in shown
        assert f'href="{page}"' in shown  # links to the replaced job
        old = (await browser.get(page)).text
        assert f'href="{new}"' in old
        assert "Retry now" not in old
        assert f"{page}/edit" not in old
        assert "No dead letters" in (await browser.get("/ui/dead-letters")).text
        repeated = await browser.submit(f"{page}/edit", f"{page}/edit", payload='{"to": "bob"}')
        assert repeated.status_code == 409
        assert "took its place" in repeated.text


async def test_operators_cannot_edit_payloads(serve_sqlite: Serve) -> None:
    async with serve_sqlite() as browser:
        failed = finished_job(browser.app.clock.now() - HOUR)
        await insert_finished(browser, failed)
        page = f"/ui/jobs/{failed['id']}"
        await browser.create_user("olga", "operator")
        await browser.sign_in("olga")
        shown = (await browser.get(page)).text
        assert "Retry now" in shown
        assert f"{page}/edit" not in shown
        assert (await browser.get(f"{page}/edit")).status_code == 403
        token = re.search(r'name="_token" value="(\w+)"', shown)
        assert token is not None
        refused = await browser.post_form(f"{page}/edit", {"_token": token[1], "payload": "1"})
        assert refused.status_code == 403
        await browser.create_user("vera", "viewer")
        await browser.sign_in("vera")
        page_tags = Tags((await browser.get("/ui/jobs")).text)
        assert not [tag for tag in page_tags.find_all("input") if tag.get("type") == "checkbox"]
        assert (await browser.get("/ui/jobs/export?format=jsonl")).status_code == 200


async def test_selected_jobs_are_cancelled_or_retried_after_a_confirmation(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        ids = [
            (await browser.web.post("/api/v1/jobs", {"topic": f"many.{n}", "runAt": LATER})).json()["id"]
            for n in range(3)
        ]
        dead, done = (
            finished_job(browser.app.clock.now() - HOUR),
            finished_job(browser.app.clock.now() - HOUR, "completed"),
        )
        await insert_finished(browser, dead, done)
        action = "/ui/jobs/several"

        async def status(id_: str) -> str:
            return (await browser.web.get(f"/api/v1/jobs/{id_}")).json()["status"]  # type: ignore[no-any-return]

        assert (await browser.submit("/ui/jobs", action, what="cancel")).status_code == 400
        chosen = {f"one-{id_}": "1" for id_ in ids[:2]}
        confirmation = await browser.submit(
            "/ui/jobs?q=status:pending", action, what="cancel", q="status:pending", **chosen
        )
        assert "Cancel 2 jobs?" in confirmation.text
        assert "many.0, many.1" in confirmation.text
        assert await status(ids[0]) == "pending"
        done_page = await browser.submit("/ui/jobs", action, what="cancel", sure="1", q="status:pending", **chosen)
        assert done_page.headers["location"] == "/ui/jobs?q=status%3Apending&did=bulk-cancel"
        assert "Pending jobs will not start" in (await browser.get(done_page.headers["location"])).text
        assert [await status(id_) for id_ in ids] == ["cancelled", "cancelled", "pending"]
        late = {f"one-{id_}": "1" for id_ in (ids[2], done["id"])}
        partial = await browser.submit("/ui/jobs", action, what="cancel", sure="1", **late)
        assert partial.status_code == 409
        assert "Cancelled 1 of 2" in partial.text
        assert "Already completed." in partial.text
        both = {f"one-{id_}": "1" for id_ in (dead["id"], done["id"])}
        partial = await browser.submit("/ui/jobs", action, what="retry", sure="1", **both)
        assert "Retried 1 of 2" in partial.text
        assert "only failed jobs can be retried" in partial.text
        assert await status(dead["id"]) == "pending"


async def test_job_lists_are_exported_as_csv_and_jsonl(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(allow_local=True) as browser:
        now = browser.app.clock.now()
        evil = '=HYPERLINK("http://x")'
        rows = [finished_job(now - n * HOUR, error=evil, payload=f'"-{n}"') for n in range(5, 0, -1)][
            ::-1
        ]  # ids ascend, the list is newest first
        await insert_finished(
            browser, *rows, finished_job(now, tenant_id="acme"), finished_job(now, "completed", topic="other")
        )
        monkeypatch.setattr(exports, "PAGE_SIZE", 2)
        answer = await browser.get("/ui/jobs/export?q=topic:erp.sync")
        assert answer.headers["content-type"].startswith("text/csv")
        assert re.fullmatch(
            r'attachment; filename="timebell-jobs-[\dT-]+Z\.csv"', answer.headers["content-disposition"]
        )
        exported = list(csv.DictReader(io.StringIO(answer.text)))
        assert [row["id"] for row in exported] == [row["id"] for row in rows]
        assert {row["errorMessage"] for row in exported} == {f"'{evil}"}
        assert [row["payload"] for row in exported] == [f"'-{n}" for n in range(1, 6)]
        assert exported[0]["attemptNumber"] == "1"
        monkeypatch.setattr(exports, "MAX_ROWS", 3)
        answer = await browser.get("/ui/jobs/export?format=jsonl&q=status:failed")
        exported = [json.loads(line) for line in answer.text.splitlines()]
        assert [row["id"] for row in exported] == [row["id"] for row in rows[:3]]
        assert exported[0]["errorMessage"] == evil  # only CSV cells are escaped
        dead = await browser.get("/ui/dead-letters/export?format=jsonl&errorCode=ValueError")
        assert [json.loads(line)["id"] for line in dead.text.splitlines()] == [row["id"] for row in rows[:3]]
        assert (await browser.get("/ui/jobs/export?q=colour:red")).status_code == 422
        assert 'href="/ui/jobs/export?q=status%3Afailed&amp;format=csv"' in (
            await browser.get("/ui/jobs?q=status:failed")
        ).text  # fmt: skip


async def test_the_runs_of_a_schedule_are_exported(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        schedule_id = (await browser.web.post("/api/v1/schedules", NIGHTLY)).json()["id"]
        now = browser.app.clock.now()
        await insert_finished(
            browser,
            *(finished_job(now - n * HOUR, "completed", schedule_id=schedule_id, kind="planned") for n in range(1, 31)),
        )
        page = await browser.get(f"/ui/schedules/{schedule_id}")
        assert f'href="/ui/schedules/{schedule_id}/export?format=csv"' in page.text
        answer = await browser.get(f"/ui/schedules/{schedule_id}/export")
        assert len(list(csv.DictReader(io.StringIO(answer.text)))) == 30
        assert "Last 28 runs: 0 failed" in (await browser.get("/ui/schedules")).text


@pytest.mark.parametrize("text", ["=1", "+1", "-1", "@x", "\t=1", "\r=1", "\uff1d1"])
def test_exported_cells_are_never_formulas(text: str) -> None:
    assert csv_rows.escape_cell(text) == f"'{text}"
    assert csv_rows.escape_cell({"a": text}) == json.dumps({"a": text}, ensure_ascii=False)
    assert (csv_rows.escape_cell(-1), csv_rows.escape_cell(None), csv_rows.escape_cell("a=1")) == (-1, None, "a=1")


async def test_dead_letters_show_their_schedule_and_repeated_failures(serve: Serve) -> None:
    async with serve(allow_local=True) as browser:
        schedule_id = (await browser.web.post("/api/v1/schedules", NIGHTLY)).json()["id"]
        now = browser.app.clock.now()
        repeated = finished_job(now - HOUR, schedule_id=schedule_id, kind="planned", manual_retries=2)
        await insert_finished(
            browser,
            repeated,
            finished_job(now - 2 * HOUR),
            finished_job(now - 3 * HOUR, schedule_id=new_id(now), kind="planned"),
        )
        groups = plain_text((await browser.get("/ui/dead-letters")).text)
        assert re.search(r"3 nightly \d+ \w+ ago 1 failed again 2 times", groups), groups
        group = plain_text((await browser.get("/ui/dead-letters?errorCode=ValueError")).text)
        short_id = f"{repeated['id'][:8]} …{repeated['id'][-6:]}"
        for row in (f"{short_id} nightly", "one-off", "deleted"):
            assert row in group
        assert group.count("failed again") == 2  # in the summary of the group and in the list


async def test_rows_of_live_jobs_state_why_they_wait(serve_sqlite: Serve, sqlite_url: str) -> None:
    app = Timebell(sqlite_url)

    @app.on("erp.sync", retry=Retry(attempts=3, delay=3600))
    async def fail(event: Arrived) -> None:
        raise ConnectionError("bank is away")

    async with serve_sqlite(allow_local=True, app=app) as browser, app.running():
        zone = "America/Argentina/ComodRivadavia"  # its abbreviation is only an offset
        for topic in ("erp.sync", "erp.sink"):
            await browser.web.post("/api/v1/jobs", {"topic": topic, "timezone": zone})

        async def both_wait() -> bool:
            jobs = (await browser.web.get("/api/v1/jobs")).json()["items"]
            return any(job["attemptsMade"] for job in jobs) and any(job["hold"] for job in jobs)

        await wait_until(both_wait)
        retrying = plain_text((await browser.get("/ui/jobs?q=status:retrying")).text)
        assert re.search(r"UTC-03 .* Retrying next attempt in 10 min .*: ConnectionError: bank is away", retrying)
        assert zone not in retrying
        assert "erp.sink" not in retrying
        held = plain_text((await browser.get("/ui/jobs?q=status:held")).text)
        assert "Held no node handles its topic" in held
        assert "erp.sync" not in held
        schedule = {**NIGHTLY, "name": "new", "timezone": zone, "jobType": "erp.sync"}
        url = f"/ui/schedules/{(await browser.web.post('/api/v1/schedules', schedule)).json()['id']}"
        assert "Not run yet" in (await browser.get("/ui/schedules")).text
        assert "Not run yet" in (await browser.get(url)).text
        schedule |= {"name": "unknown", "jobType": "erp.sink"}
        url = f"/ui/schedules/{(await browser.web.post('/api/v1/schedules', schedule)).json()['id']}"
        assert "Unhandled" in (await browser.get("/ui/schedules")).text
        assert "Did you mean erp.sync?" in (await browser.get(url)).text


async def test_jobs_that_started_late_are_found_by_their_lag(serve: Serve) -> None:
    async with serve(allow_local=True) as browser:
        schedule_id = (await browser.web.post("/api/v1/schedules", NIGHTLY)).json()["id"]
        now = browser.app.clock.now()

        def late(seconds: float, ago: timedelta = HOUR / 4, **columns: Any) -> dict[str, Any]:
            return finished_job(now - ago, "completed", run_at=now - ago - timedelta(seconds=seconds)) | columns

        rows = [late(0.2), late(3, attempt=2), late(7, topic="tea"), late(9, schedule_id=schedule_id, state="failed")]
        await insert_finished(browser, *rows, late(60, 2 * HOUR), late(60, tenant_id="acme"))

        async def listed_ids(q: str) -> set[str]:
            answer = await browser.get(f"/ui/jobs?q={q}")
            assert answer.status_code == 200, plain_text(answer.text)
            return set(re.findall(r'data-row.*?href="/ui/jobs/([0-9a-f-]+)"', answer.text, re.DOTALL))

        a, b, c, d = (row["id"] for row in rows)
        assert await listed_ids("lag:>1s") == {b, c, d}
        assert await listed_ids("lag:>=100ms") == {a, b, c, d}
        assert await listed_ids("lag:5s topic:tea") == {c}
        assert await listed_ids("lag:>1s status:failure schedule:nightly") == {d}
        assert await listed_ids("lag:>1s attempts:2") == {b}
        assert await listed_ids("lag:>1h") == set()
        for wrong in ("lag:long", "lag:>1s status:none"):
            assert (await browser.get(f"/ui/jobs?q={wrong}")).status_code in (400, 422)
        assert (await browser.get("/ui/jobs/export?q=lag:>1s")).status_code == 422


async def test_the_page_of_a_running_job_shows_its_progress_live(serve: Serve, store_url: str) -> None:
    app = Timebell(store_url, timezone="UTC")
    may_end = asyncio.Event()

    @app.on("book.print")
    async def print_book(event: Arrived) -> None:
        event.progress(0.4, "page <3>")
        await may_end.wait()

    async with serve(allow_local=True, app=app) as browser, app.running():
        id_ = (await app.schedule_at("book.print")).id
        page, part, api = f"/ui/jobs/{id_}", f"/ui/jobs/{id_}/progress", f"/api/v1/jobs/{id_}"

        async def progress_is_stored() -> bool:
            return (await browser.web.get(api)).json()["progress"] is not None

        await wait_until(progress_is_stored)
        progress = (await browser.web.get(api)).json()["progress"]
        assert (progress["fraction"], progress["text"]) == (0.4, "page <3>")
        for path in (page, part):
            shown = (await browser.get(path)).text
            assert "40%, page &lt;3&gt;" in shown
            assert 'value="0.4" max="1"' in shown
            assert f'hx-get="{part}" hx-trigger="every 1s"' in shown or not has_live_scripts()
        may_end.set()
        await wait_until(lambda: _has_ended(browser, api))
        shown = (await browser.get(part)).text
        assert f'hx-get="{page}" hx-trigger="load"' in shown or not has_live_scripts()
        ended = (await browser.get(page)).text
        assert "last progress: 40%, page &lt;3&gt;" in ended
        assert 'id="progress" class="panel">' in ended  # no further requests


async def _has_ended(browser: Browser, api: str) -> bool:
    return bool((await browser.web.get(api)).json()["status"] == "completed")
