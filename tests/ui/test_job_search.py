"""Search of jobs: by time, ids, JSON fields, error text and topic wildcards, on the page and in the API."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from timebell.model.error_groups import error_group
from timebell.store.jobs import repository

from .test_job_pages import finished_job, insert_finished, plain_text

Serve = Callable[..., Any]
HOUR = timedelta(hours=1)


async def test_jobs_are_found_by_time_ids_fields_and_error(serve: Serve) -> None:
    async with serve(allow_local=True) as browser:
        web, now = browser.web, browser.app.clock.now()
        body = {
            "topic": "order.paid", "runAt": "2040-01-01T00:00:00Z",
            "payload": {"order": {"id": 4711, "lines": ["tea"]}, "note": 'say "50%"'},
            "metadata": {"correlationId": "c-9", "clientRequestId": "r-9", "campaign": "spring", "ownerId": "ana"},
        }  # fmt: skip
        live = (await web.post("/api/v1/jobs", body)).json()["id"]
        other = (await web.post("/api/v1/jobs", {**body, "payload": {"id": 4711}, "metadata": {}})).json()["id"]
        late, early = (finished_job(now - hours * HOUR, error="ValueError: Bank is AWAY") for hours in (1, 30))
        await insert_finished(browser, late, early, finished_job(now - HOUR, "completed", topic="billing.close"))

        async def found(query: str) -> set[str]:
            answer = await web.get(f"/api/v1/jobs?{query}")
            assert answer.status_code == 200, answer.text
            return {job["id"] for job in answer.json()["items"]}

        assert await found("payload=order.id=4711") == {live}
        assert await found("payload=order.lines.0=tea") == {live}
        assert await found("payload=id=4711") == {other}
        assert await found('payload=note=say "50%25"') == {live}
        assert await found("payload=order.id=471") == set()
        assert await found("metadata=campaign=spring&ownerId=ana") == {live}
        assert await found("correlationId=c-9") == {live}
        assert await found("correlationId=c-") == set()
        assert await found("clientRequestId=r-9") == {live}
        assert await found("topic=order.*") == {live, other}
        assert await found("topic=order*&status=failed") == set()
        assert await found("error=bank is away") == {late["id"], early["id"]}
        start = (now - 2 * HOUR).strftime("%Y-%m-%dT%H:%M:%SZ")
        assert await found(f"status=failed&from={start}") == {late["id"]}
        assert await found(f"status=failed&to={start}") == {early["id"]}
        assert (await web.get("/api/v1/jobs?payload=order.id")).status_code == 422

        typed = await browser.get('/ui/jobs?q=status:failed from:24h error:"bank is away"')
        url = "/ui/jobs?q=status%3Afailed+error%3A%22bank+is+away%22&from=24h"
        assert typed.headers["location"] == url  # a period in the filter becomes that of the page
        page = await browser.get(url)
        assert set(re.findall(r'data-row.*?href="/ui/jobs/([0-9a-f-]+)"', page.text, re.DOTALL)) == {late["id"]}
        assert 'href="/ui/jobs?q=status%3Afailed+error%3A%22bank+is+away%22&amp;from=7d"' in page.text
        assert (await browser.get("/ui/jobs?q=lag:>1s&from=1h")).status_code == 422


async def test_a_search_examines_a_limited_number_of_jobs_per_page(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository, "MAX_EXAMINED", 4)
    async with serve(allow_local=True) as browser:
        now = browser.app.clock.now()
        rows = [finished_job(now - n * HOUR, payload=f'{{"n":{n}}}') for n in range(1, 11)]
        await insert_finished(browser, *rows)
        found, pages, more = [], 0, "&"
        while more:
            answer = (await browser.web.get(f"/api/v1/jobs?payload=n=9&limit=2{more}")).json()
            found += [job["id"] for job in answer["items"]]
            more, pages = answer["nextCursor"] and f"&cursor={answer['nextCursor']}", pages + 1
        assert (found, pages) == ([rows[8]["id"]], 3)


async def test_dead_letters_are_grouped_by_topic_code_and_message(serve: Serve) -> None:
    async with serve(allow_local=True) as browser:
        now = browser.app.clock.now()

        def dead(topic: str, error: str) -> dict[str, Any]:
            return finished_job(
                now - HOUR, topic=topic, error=error, error_code="ConnectionError", error_group=error_group(error)
            )

        erp = [dead("erp.sync", f"ConnectionError: erp-{n} is away (ops.py:{n} in erp)") for n in range(3)]
        bank = [
            dead("erp.sync", "ConnectionError: bank is away"),
            dead("billing.close", "ConnectionError: bank is away"),
        ]
        await insert_finished(browser, *erp, *bank)
        groups = (await browser.web.get("/api/v1/dead-letters?groupBy=error")).json()["items"]
        counts = [(group["topic"], group["count"]) for group in groups]
        assert (counts[0], sorted(counts[1:])) == (("erp.sync", 3), [("billing.close", 1), ("erp.sync", 1)])
        fields = {"topic": "erp.sync", "errorCode": "ConnectionError", "errorGroup": groups[0]["errorGroup"]}
        confirmation = await browser.submit("/ui/dead-letters", "/ui/dead-letters/retry", **fields)
        assert "Retry 3 jobs?" in plain_text(confirmation.text)


async def test_all_matching_jobs_are_cancelled_after_a_confirmation(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(allow_local=True) as browser:
        for _ in range(51):
            job = {"topic": "many.mails", "runAt": "2040-01-01T00:00:00Z"}
            assert (await browser.web.post("/api/v1/jobs", job)).status_code == 201
        assert (await browser.web.post("/api/v1/jobs", {**job, "topic": "other"})).status_code == 201
        page = "/ui/jobs?q=status:pending topic:many.mails"
        confirmation = await browser.submit(page, "/ui/jobs/cancel", topic="many.mails")
        assert "Cancel 51 jobs?" in plain_text(confirmation.text)
        started = await browser.submit(page, "/ui/jobs/cancel", topic="many.mails", sure="1")
        assert started.headers["location"].startswith("/ui/operations/")


async def test_the_search_of_all_pages_offers_only_jobs_that_exist(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        body = {"topic": "order.paid", "runAt": "2040-01-01T00:00:00Z",
                "metadata": {"ownerId": "ana", "clientRequestId": "r-9"}}  # fmt: skip
        assert (await browser.web.post("/api/v1/jobs", body)).status_code == 201
        for q, url in (("order.paid", "topic%3Aorder.paid"), ("ana", "owner%3Aana"), ("r-9", "request%3Ar-9")):
            assert f'href="/ui/jobs?q={url}"' in (await browser.get(f"/ui/search?q={q}")).text
        assert "/ui/jobs?q=" not in (await browser.get("/ui/search?q=order.piad")).text
