"""A report hands on at once to whoever waits for it, on this node or another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.targets.sink import SECRET as SIGNING
from tests.unit.targets.sink import Sink, sink
from timebell import Timebell
from timebell.engine import worker
from timebell.model.limits import Limits
from timebell.store.jobs import queues

from .test_reports import Make, hand, handing_out, in_state, job, token, until
from .web import NIGHTLY, Web

ASLEEP = {"heartbeat": 600.0, "lease": 1800.0, "poll": 600.0}


@pytest.fixture(autouse=True)
def _sound_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker does not even look again soon at what is due and not to be had."""
    monkeypatch.setattr(worker, "SHORTEST", 600.0)
    monkeypatch.setattr(worker, "LONGEST", 600.0)


def outside(receiver: Sink) -> dict[str, Any]:
    return {"kind": "http", "url": f"http://127.0.0.1:{receiver.port}/status/202", "reportsBack": True}


async def hands_on(web: Web, receiver: Sink) -> None:
    """Of three in a turn, a group or a narrow queue each starts when the one before it is reported; and what is to be
    tried again is."""
    await web.app.store.run(queues.put, "narrow", Limits(concurrency=1))
    await web.app.store.run(queues.put, "grouped", Limits(concurrency_per_group=1))
    yearly = {**NIGHTLY, "cronExpression": "0 0 29 2 *", "overlapPolicy": "queue", "target": outside(receiver)}
    schedule = (await web.post("/schedules", yearly)).json()["id"]

    async def by_hand() -> str:
        return (await web.post(f"/schedules/{schedule}/trigger")).json()["id"]  # type: ignore[no-any-return]

    async def out(ids: set[str]) -> tuple[str, str]:
        """The one of them that is dispatched, and its token; the others wait."""

        async def there() -> str | None:
            states = {id_: (await job(web, id_))["status"] for id_ in ids}
            assert sum(state != "pending" for state in states.values()) < 2, states
            return next((id_ for id_, state in states.items() if state == "dispatched"), None)

        found: str = await until(there)
        return found, next(one.headers["timebell-token"] for one in receiver.requests if found.encode() in one.body)

    for another in (
        by_hand, lambda: hand(web, receiver, queue="grouped", group="a"), lambda: hand(web, receiver, queue="narrow"),
    ):  # fmt: skip
        ids = {await another() for _ in range(3)}
        for verb, more in (("complete", {}), ("fail", {"error": "gone", "retryable": False}), ("complete", {})):
            id_, given = await out(ids)
            assert (await web.post(f"/jobs/{id_}/{verb}", {"token": given, **more})).status_code == 200
            ids.discard(id_)
    id_ = await hand(web, receiver, retry={"attempts": 2, "backoff": {"type": "fixed", "delay": 0}})
    await in_state(web, id_, "dispatched")
    assert (await web.post(f"/jobs/{id_}/fail", {"token": token(receiver), "error": "again"})).status_code == 200
    await in_state(web, id_, "dispatched", attempt=2)
    assert (await web.post(f"/jobs/{id_}/complete", {"token": token(receiver)})).status_code == 200


async def test_on_the_node_that_hears_it(make: Make) -> None:
    async with handing_out(make, **ASLEEP) as (web, receiver):
        await hands_on(web, receiver)


@pytest.mark.parametrize("store_url", ["postgres"], indirect=True)
async def test_on_another_node(make: Make, store_url: str) -> None:
    """As where the API has a process of its own. On SQLite such processes look by the clock."""
    other = Timebell(store_url)
    async with make() as web, sink() as receiver:
        other.settings = web.app.settings = replace(
            web.app.settings, webhook_signing_secret=SIGNING, webhook_allow_private=True
        )  # fmt: skip
        try:
            async with other.running(**ASLEEP):
                await hands_on(web, receiver)
                delay = {"name": "delay", "interval": {"everyMs": 1000, "since": "last_end"}, "timezone": "UTC"}
                made = await web.post("/schedules", {**delay, "topic": "t", "target": outside(receiver)})
                assert made.status_code == 201, made.text

                async def dispatched() -> Any:
                    return (await web.get("/jobs?status=dispatched")).json()["items"]

                (first,) = await until(dispatched)
                await web.post(f"/jobs/{first['id']}/complete", {"token": token(receiver)})
                (second,) = await until(dispatched)
                assert second["id"] != first["id"]
        finally:
            await other.close()
