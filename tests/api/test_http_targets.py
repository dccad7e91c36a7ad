"""Requests of named http targets, with an engine and a receiver: credentials, timeouts and limits, on both stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text as sql

from tests.unit.targets.http_servers import TokenSink
from tests.unit.targets.sink import OLDER, Sink, sink
from timebell.engine.service import Service

from .web import NIGHTLY, Web, is_problem, wait_until

Make = Callable[..., Any]
LATER = "2040-01-01T00:00:00Z"
on_sqlite_only = pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)


class Gate(Sink):
    """Holds requests to /gate until `opened`; `most` is the highest number of simultaneous requests."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = asyncio.Event()
        self.current = self.most = 0

    async def gate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        self.current += 1
        self.most = max(self.most, self.current)
        await self.opened.wait()
        self.current -= 1
        await self.answer(writer, "200 OK", b"done")


@asynccontextmanager
async def delivering(make: Make, receiver: Sink, **running: Any) -> AsyncIterator[tuple[Web, Service]]:
    async with make(timezone="UTC") as web, sink(server_state=receiver):
        web.app.settings = replace(web.app.settings, webhook_allow_private=True, webhook_signing_secret=OLDER)
        async with web.app.running(**{"heartbeat": 0.1, **running}) as service:
            yield web, service


async def put(web: Web, receiver: Sink, path: str, expected: int = 200, **options: Any) -> Any:
    url = f"http://127.0.0.1:{receiver.port}/{path}"
    made = await web.ask("PUT", "/targets/crm", {"kind": "http", "options": {"url": url, **options}})
    assert made.status_code == expected, made.text
    return made


async def create_job(web: Web, **fields: Any) -> str:
    made = await web.post("/jobs", {"topic": "t.t", "timezone": "UTC", "maxRetries": 0, "target": "crm", **fields})
    assert made.status_code == 201, made.text
    return str(made.json()["id"])


@on_sqlite_only
async def test_credentials_of_a_target_have_to_be_secrets(make: Make) -> None:
    receiver = TokenSink()
    async with delivering(make, receiver) as (web, service):
        auth = {"type": "oauth2", "tokenUrl": f"http://127.0.0.1:{receiver.port}/token", "clientId": "app"}
        refused = await put(web, receiver, "api", 422, auth={**auth, "clientSecret": "hunter2-plain"})
        is_problem(refused, 422, "SECRET_REQUIRED")
        assert "hunter2" not in refused.text
        await web.post("/secrets", {"name": "crm", "value": "hunter2 word/&"})
        made = await put(
            web, receiver, "api", auth={**auth, "clientSecret": {"secret": "crm"}, "clientAuthentication": "body"},
            body="form", template={"text": "{{payload.text}}"}, query={"key": {"secret": "crm"}},
        )  # fmt: skip
        assert made.json()["options"]["auth"]["clientSecret"] == {"secret": "crm"}
        tested = (await web.post("/targets/crm/test", {"payload": {"text": "it is hunter2 word/&"}})).json()
        assert receiver.forms[0]["client_secret"] == "hunter2 word/&"
        assert receiver.requests[1].body == b"text=it+is+hunter2+word%2F%26"
        assert (tested["delivered"], tested["request"]["method"]) == (True, "POST")
        assert tested["request"]["url"] == f"http://127.0.0.1:{receiver.port}/api?key=***"
        assert tested["request"]["body"] == "text=it+is+***"
        assert tested["request"]["headers"]["authorization"] == "Bearer ***"
        assert tested["response"]["status"] == 200
        assert tested["response"]["body"] == "you sent Bearer ***"
        id_ = await create_job(web, payload={"text": "x"})
        await service.wait_until_idle()
        job = await web.get(f"/jobs/{id_}")
        assert (job.json()["status"], job.json()["result"]["body"]) == ("completed", "you sent Bearer ***")
        for text in (tested, job.text, made.text):
            assert "hunter2" not in str(text)
            assert "issued-token" not in str(text)


@on_sqlite_only
async def test_an_inline_target_has_no_credentials(make: Make) -> None:
    receiver = Sink()
    async with delivering(make, receiver) as (web, service):
        inline = {"kind": "http", "url": f"http://127.0.0.1:{receiver.port}/status/200", "method": "GET"}
        for option in ("auth", "tls", "proxy", "concurrency", "rate"):
            refused = await web.post("/jobs", {"topic": "t.t", "target": {**inline, option: {}}})
            is_problem(refused, 422, "INVALID_TARGET_OPTIONS")
        unresolved = {**inline, "query": {"id": "{{payload.id}}"}}
        is_problem(await web.post("/jobs", {"topic": "t.t", "target": unresolved}), 422, "INVALID_BODY")
        id_ = await create_job(web, target=unresolved, payload={"id": "a/b"})
        await service.wait_until_idle()
        assert (await web.get(f"/jobs/{id_}")).json()["status"] == "completed"
        assert receiver.requests[0].line == "GET /status/200?id=a%2Fb HTTP/1.1"


@on_sqlite_only
async def test_the_lease_is_renewed_while_a_request_takes_longer(make: Make) -> None:
    receiver = Gate()
    async with delivering(make, receiver, lease=3) as (web, service):
        await put(web, receiver, "gate", timeout="30m")
        id_ = await create_job(web)
        await wait_until(lambda: receiver.current)

        async def heartbeats() -> bool:
            counter: int = await web.app.store.run(
                lambda tx: tx.execute(sql("SELECT heartbeat FROM timebell_jobs")).scalar_one()
            )
            return counter > 31  # more than one lease

        await wait_until(heartbeats)
        receiver.opened.set()
        await service.wait_until_idle()
        job = (await web.get(f"/jobs/{id_}")).json()
        assert (job["status"], job["attemptNumber"], len(receiver.requests)) == ("completed", 1, 1)


@on_sqlite_only
async def test_cancelling_a_job_closes_its_request(make: Make) -> None:
    receiver = Sink()
    async with delivering(make, receiver) as (web, service):
        await put(web, receiver, "hang", timeout="30m")
        id_ = await create_job(web)
        await wait_until(lambda: receiver.requests)
        cancelled = await web.post(f"/jobs/{id_}/cancel", {"stop": True})
        assert cancelled.json()["outcome"] == "in_flight"
        await asyncio.wait_for(receiver.gone.wait(), 30)
        await service.wait_until_idle()
        assert (await web.get(f"/jobs/{id_}")).json()["status"] == "cancelled"


async def test_a_target_with_limits_has_a_queue_of_its_own(make: Make) -> None:
    receiver = Gate()
    async with delivering(make, receiver) as (web, service):
        await put(web, receiver, "gate")
        await web.post("/schedules", {**NIGHTLY, "target": "crm"})
        waiting = await create_job(web, runAt=LATER)
        await put(web, receiver, "gate", concurrency=2, rate=1000, perSeconds=60)
        queue = "target:default/crm"
        assert (await web.get(f"/jobs/{waiting}")).json()["queue"] == queue
        await asyncio.gather(*(create_job(web) for _ in range(6)))
        own = await create_job(web, queue="mine", runAt=LATER)
        assert (await web.get(f"/jobs/{own}")).json()["queue"] == "mine"
        await wait_until(lambda: receiver.current == 2)
        schedule = (await web.get("/schedules?name=nightly")).json()["items"][0]
        ran = (await web.post(f"/schedules/{schedule['id']}/trigger")).json()
        assert (await web.get(f"/jobs/{ran['id']}")).json()["queue"] == queue
        assert schedule["queue"] == "default"
        shown = (await web.get("/queues")).json()["items"]
        assert [(one["concurrency"], one["rate"]) for one in shown if one["name"] == queue] == [(2, 1000)]
        receiver.opened.set()
        await wait_until(lambda: len(receiver.requests) == 7)
        await service.wait_until_idle()
        assert receiver.most == 2
        await put(web, receiver, "gate")
        unlimited = await create_job(web, runAt=LATER)
        assert (await web.get(f"/jobs/{unlimited}")).json()["queue"] == "default"


@on_sqlite_only
async def test_queues_of_targets_are_hidden_from_other_tenants(make: Make) -> None:
    receiver = Sink()
    async with delivering(make, receiver) as (web, _):
        await put(web, receiver, "status/200", concurrency=1)
        await web.app.targets.put(
            "crm", "http", {"url": f"http://127.0.0.1:{receiver.port}/", "concurrency": 1}, tenant_id="other"
        )
        names = [queue["name"] for queue in (await web.get("/queues")).json()["items"]]
        assert "target:default/crm" in names
        assert "target:other/crm" not in names
