"""Pages of jobs over rows as an engine leaves them: payloads mended, several at once, lists as files."""

from __future__ import annotations

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
from timebell.dashboard import exports
from timebell.ids import new_id
from timebell.store import schema

from .browsing import Browser, Tags

Make = Callable[..., Any]
LATER = "2040-01-01T00:00:00Z"
HOUR = timedelta(hours=1)


def ended(at: datetime, state: str = "failed", **more: Any) -> dict[str, Any]:
    """A row of a job that ended at an instant."""
    return {
        "id": new_id(at), "tenant_id": "default", "topic": "erp.sync", "kind": "once", "scheduled_at": at, "run_at": at,
        "timezone": "UTC", "payload": '{"to": "nobody"}', "queue": "default", "priority": 0, "serial": False,
        "state": state, "attempt": 1, "tries": 1, "created_at": at, "started_at": at, "finished_at": at,
        "error_code": "ValueError" if state == "failed" else None, "schedule_id": None, "error": None, "replays": 0,
        "reason": None,
    } | more  # fmt: skip


async def write(browser: Browser, *rows: dict[str, Any]) -> None:
    """Put these into the history."""
    await browser.app.open()
    await browser.app.store.run(lambda tx: tx.execute(insert(schema.finished), list(rows)))


def plain(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


async def test_the_payload_of_a_failed_job_is_mended_in_a_form(make: Make) -> None:
    async with make(open_here=True) as browser:
        failed = ended(browser.app.clock.now() - HOUR)
        await write(browser, failed)
        page = f"/ui/jobs/{failed['id']}"
        assert f'href="{page}/edit"' in (await browser.look(page)).text
        assert "nobody" in (await browser.look(f"{page}/edit")).text
        for wrong, word in (('{"to": "ana"', "JSON"), ("NaN", "no such number"), ("1" * 40, "64 bits")):
            refused = await browser.press(f"{page}/edit", f"{page}/edit", payload=wrong)
            assert refused.status_code == 422
            assert word in refused.text
            assert wrong.replace('"', "&#34;") in refused.text  # nothing typed is lost
        done = await browser.press(f"{page}/edit", f"{page}/edit", payload='{"to": "ana"}')
        assert done.status_code == 303
        new = done.headers["location"].split("?")[0]
        shown = (await browser.look(done.headers["location"])).text
        assert "the payload as you wrote it" in shown
        assert "&#34;ana&#34;" in shown
        assert f'href="{page}"' in shown  # in place of
        old = (await browser.look(page)).text
        assert f'href="{new}"' in old
        assert "Retry now" not in old
        assert f"{page}/edit" not in old
        assert "Nothing is dead" in (await browser.look("/ui/dead-letters")).text
        again = await browser.press(f"{page}/edit", f"{page}/edit", payload='{"to": "bob"}')
        assert again.status_code == 409
        assert "took its place" in again.text


async def test_who_may_only_operate_cannot_write_payloads(make_light: Make) -> None:
    async with make_light() as browser:
        failed = ended(browser.app.clock.now() - HOUR)
        await write(browser, failed)
        page = f"/ui/jobs/{failed['id']}"
        await browser.user("olga", "operator")
        await browser.sign_in("olga")
        shown = (await browser.look(page)).text
        assert "Retry now" in shown
        assert f"{page}/edit" not in shown
        assert (await browser.look(f"{page}/edit")).status_code == 403
        token = re.search(r'name="_token" value="(\w+)"', shown)
        assert token is not None
        sent = await browser.send(f"{page}/edit", {"_token": token[1], "payload": "1"})
        assert sent.status_code == 403
        await browser.user("vera", "viewer")
        await browser.sign_in("vera")
        seen = Tags((await browser.look("/ui/jobs")).text)
        assert not [one for one in seen.named("input") if one.get("type") == "checkbox"]
        assert (await browser.look("/ui/jobs/export?format=jsonl")).status_code == 200


async def test_several_jobs_are_cancelled_or_retried_after_a_look(make_light: Make) -> None:
    async with make_light(open_here=True) as browser:
        made = [
            (await browser.web.post("/api/v1/jobs", {"topic": f"many.{n}", "runAt": LATER})).json()["id"]
            for n in range(3)
        ]
        dead, done = ended(browser.app.clock.now() - HOUR), ended(browser.app.clock.now() - HOUR, "completed")
        await write(browser, dead, done)
        action = "/ui/jobs/several"

        async def status(id_: str) -> str:
            return (await browser.web.get(f"/api/v1/jobs/{id_}")).json()["status"]  # type: ignore[no-any-return]

        assert (await browser.press("/ui/jobs", action, what="cancel")).status_code == 400
        chosen = {f"one-{id_}": "1" for id_ in made[:2]}
        asked = await browser.press("/ui/jobs?q=status:pending", action, what="cancel", q="status:pending", **chosen)
        assert "Cancel 2 jobs?" in asked.text
        assert "many.0, many.1" in asked.text
        assert await status(made[0]) == "pending"
        went = await browser.press("/ui/jobs", action, what="cancel", sure="1", q="status:pending", **chosen)
        assert went.headers["location"] == "/ui/jobs?q=status%3Apending&did=several-cancel"
        assert "what waited will not start" in (await browser.look(went.headers["location"])).text
        assert [await status(id_) for id_ in made] == ["cancelled", "cancelled", "pending"]
        late = {f"one-{id_}": "1" for id_ in (made[2], done["id"])}
        some = await browser.press("/ui/jobs", action, what="cancel", sure="1", **late)
        assert some.status_code == 409
        assert "Cancelled 1 of 2" in some.text
        assert "It is completed already." in some.text
        both = {f"one-{id_}": "1" for id_ in (dead["id"], done["id"])}
        some = await browser.press("/ui/jobs", action, what="retry", sure="1", **both)
        assert "Retried 1 of 2" in some.text
        assert "only failed jobs are replayed" in some.text
        assert await status(dead["id"]) == "pending"


async def test_lists_are_files_too(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make(open_here=True) as browser:
        now = browser.app.clock.now()
        evil = '=HYPERLINK("http://x")'
        rows = [ended(now - n * HOUR, error=evil, payload=f'"-{n}"') for n in range(5, 0, -1)][::-1]  # ids rise
        await write(browser, *rows, ended(now, tenant_id="acme"), ended(now, "completed", topic="other"))
        monkeypatch.setattr(exports, "PAGE", 2)
        answer = await browser.look("/ui/jobs/export?q=topic:erp.sync")
        assert answer.headers["content-type"].startswith("text/csv")
        assert re.fullmatch(
            r'attachment; filename="timebell-jobs-[\dT-]+Z\.csv"', answer.headers["content-disposition"]
        )
        found = list(csv.DictReader(io.StringIO(answer.text)))
        assert [one["id"] for one in found] == [row["id"] for row in rows]
        assert {one["errorMessage"] for one in found} == {f"'{evil}"}
        assert [one["payload"] for one in found] == [f"'-{n}" for n in range(1, 6)]
        assert found[0]["attemptNumber"] == "1"
        monkeypatch.setattr(exports, "MOST", 3)
        answer = await browser.look("/ui/jobs/export?format=jsonl&q=status:failed")
        found = [json.loads(line) for line in answer.text.splitlines()]
        assert [one["id"] for one in found] == [row["id"] for row in rows[:3]]
        assert found[0]["errorMessage"] == evil  # a program is told as it is
        dead = await browser.look("/ui/dead-letters/export?format=jsonl&errorCode=ValueError")
        assert [json.loads(line)["id"] for line in dead.text.splitlines()] == [row["id"] for row in rows[:3]]
        assert (await browser.look("/ui/jobs/export?q=colour:red")).status_code == 422
        assert 'href="/ui/jobs/export?q=status%3Afailed&amp;format=csv"' in (
            await browser.look("/ui/jobs?q=status:failed")
        ).text  # fmt: skip


async def test_what_became_of_a_schedule_is_a_file_too(make_light: Make) -> None:
    async with make_light(open_here=True) as browser:
        made = (await browser.web.post("/api/v1/schedules", NIGHTLY)).json()["id"]
        now = browser.app.clock.now()
        await write(
            browser, *(ended(now - n * HOUR, "completed", schedule_id=made, kind="planned") for n in range(1, 31))
        )
        page = await browser.look(f"/ui/schedules/{made}")
        assert f'href="/ui/schedules/{made}/export?format=csv"' in page.text
        answer = await browser.look(f"/ui/schedules/{made}/export")
        assert len(list(csv.DictReader(io.StringIO(answer.text)))) == 30
        assert "Last 28 runs: 0 failed" in (await browser.look("/ui/schedules")).text


@pytest.mark.parametrize("text", ["=1", "+1", "-1", "@x", "\t=1", "\r=1", "\uff1d1"])
def test_no_cell_is_a_formula(text: str) -> None:
    assert exports.cell(text) == f"'{text}"
    assert exports.cell({"a": text}) == json.dumps({"a": text}, ensure_ascii=False)
    assert (exports.cell(-1), exports.cell(None), exports.cell("a=1")) == (-1, None, "a=1")


async def test_dead_letters_say_of_which_schedule_they_are_and_what_failed_again(make: Make) -> None:
    async with make(open_here=True) as browser:
        made = (await browser.web.post("/api/v1/schedules", NIGHTLY)).json()["id"]
        now = browser.app.clock.now()
        often = ended(now - HOUR, schedule_id=made, kind="planned", replays=2)
        await write(
            browser, often, ended(now - 2 * HOUR), ended(now - 3 * HOUR, schedule_id=new_id(now), kind="planned")
        )
        groups = plain((await browser.look("/ui/dead-letters")).text)
        assert re.search(r"3 nightly \d+ \w+ ago 1 failed again 2 times", groups), groups
        those = plain((await browser.look("/ui/dead-letters?errorCode=ValueError")).text)
        for row in (f"{often['id']} nightly", "one-off", "deleted"):
            assert row in those
        assert those.count("failed again") == 2  # the group's latest, and it itself


async def test_jobs_that_started_late_are_found_by_their_lag(make: Make) -> None:
    async with make(open_here=True) as browser:
        made = (await browser.web.post("/api/v1/schedules", NIGHTLY)).json()["id"]
        now = browser.app.clock.now()

        def late(seconds: float, ago: timedelta = HOUR / 4, **more: Any) -> dict[str, Any]:
            return ended(now - ago, "completed", run_at=now - ago - timedelta(seconds=seconds)) | more

        rows = [late(0.2), late(3, attempt=2), late(7, topic="tea"), late(9, schedule_id=made, state="failed")]
        await write(browser, *rows, late(60, 2 * HOUR), late(60, tenant_id="acme"))

        async def shown(q: str) -> set[str]:
            answer = await browser.look(f"/ui/jobs?q={q}")
            assert answer.status_code == 200, plain(answer.text)
            return set(re.findall(r'data-row.*?href="/ui/jobs/([0-9a-f-]+)"', answer.text))

        a, b, c, d = (row["id"] for row in rows)
        assert await shown("lag:>1s") == {b, c, d}
        assert await shown("lag:>=100ms") == {a, b, c, d}
        assert await shown("lag:5s topic:tea") == {c}
        assert await shown("lag:>1s status:failure schedule:nightly") == {d}
        assert await shown("lag:>1s attempts:2") == {b}
        assert await shown("lag:>1h") == set()
        for wrong in ("lag:long", "lag:>1s status:none"):
            assert (await browser.look(f"/ui/jobs?q={wrong}")).status_code in (400, 422)
        assert (await browser.look("/ui/jobs/export?q=lag:>1s")).status_code == 422
