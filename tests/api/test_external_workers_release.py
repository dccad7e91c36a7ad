"""A report immediately releases the next waiting job, on the same node or another one."""

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

from .test_external_workers import Make, delivering, dispatch, in_state, job, token
from .web import NIGHTLY, Web, wait_until

WITHOUT_POLLING = {"heartbeat": 600.0, "lease": 1800.0, "poll": 600.0}


@pytest.fixture(autouse=True)
def _without_conflict_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers do not poll again soon after a conflict."""
    monkeypatch.setattr(worker, "MIN_CONFLICT_PAUSE_SECONDS", 600.0)
    monkeypatch.setattr(worker, "MAX_CONFLICT_PAUSE_SECONDS", 600.0)


def external_worker(receiver: Sink) -> dict[str, Any]:
    return {"kind": "http", "url": f"http://127.0.0.1:{receiver.port}/status/202", "reportsBack": True}


async def check_releases(web: Web, receiver: Sink) -> None:
    """Check that a report releases the next of three jobs, and that a reported failure is retried.

    The three jobs are of a serial schedule, of a group, and of a queue with concurrency 1.
    """
    await web.app.store.run(queues.set_limits, "narrow", Limits(concurrency=1))
    await web.app.store.run(queues.set_limits, "grouped", Limits(concurrency_per_group=1))
    yearly = {**NIGHTLY, "cronExpression": "0 0 29 2 *", "overlapPolicy": "queue", "target": external_worker(receiver)}
    schedule = (await web.post("/schedules", yearly)).json()["id"]

    async def trigger_run() -> str:
        return (await web.post(f"/schedules/{schedule}/trigger")).json()["id"]  # type: ignore[no-any-return]

    async def dispatched_job(ids: set[str]) -> tuple[str, str]:
        """Wait for the only dispatched job of `ids`; return its id and its token."""

        async def there() -> str | None:
            states = {id_: (await job(web, id_))["status"] for id_ in ids}
            assert sum(state != "pending" for state in states.values()) < 2, states
            return next((id_ for id_, state in states.items() if state == "dispatched"), None)

        found: str = await wait_until(there)
        return found, next(one.headers["timebell-token"] for one in receiver.requests if found.encode() in one.body)

    for another in (
        trigger_run, lambda: dispatch(web, receiver, queue="grouped", group="a"),
        lambda: dispatch(web, receiver, queue="narrow"),
    ):  # fmt: skip
        ids = {await another() for _ in range(3)}
        for verb, more in (("complete", {}), ("fail", {"error": "gone", "retryable": False}), ("complete", {})):
            id_, job_token = await dispatched_job(ids)
            assert (await web.post(f"/jobs/{id_}/{verb}", {"token": job_token, **more})).status_code == 200
            ids.discard(id_)
    id_ = await dispatch(web, receiver, retry={"attempts": 2, "backoff": {"type": "fixed", "delay": 0}})
    await in_state(web, id_, "dispatched")
    assert (await web.post(f"/jobs/{id_}/fail", {"token": token(receiver), "error": "again"})).status_code == 200
    await in_state(web, id_, "dispatched", attempt=2)
    assert (await web.post(f"/jobs/{id_}/complete", {"token": token(receiver)})).status_code == 200


async def test_a_report_releases_the_next_job_on_the_same_node(make: Make) -> None:
    async with delivering(make, **WITHOUT_POLLING) as (web, receiver):
        await check_releases(web, receiver)


@pytest.mark.parametrize("store_url", ["postgres"], indirect=True)
async def test_a_report_releases_the_next_job_on_another_node(make: Make, store_url: str) -> None:
    """The API runs in a process without workers. On SQLite, such processes poll instead of being notified."""
    other = Timebell(store_url)
    async with make() as web, sink() as receiver:
        other.settings = web.app.settings = replace(
            web.app.settings, webhook_signing_secret=SIGNING, webhook_allow_private=True
        )  # fmt: skip
        try:
            async with other.running(**WITHOUT_POLLING):
                await check_releases(web, receiver)
                delay = {"name": "delay", "interval": {"everyMs": 1000, "since": "last_end"}, "timezone": "UTC"}
                created = await web.post("/schedules", {**delay, "topic": "t", "target": external_worker(receiver)})
                assert created.status_code == 201, created.text

                async def dispatched() -> Any:
                    return (await web.get("/jobs?status=dispatched")).json()["items"]

                (first,) = await wait_until(dispatched)
                await web.post(f"/jobs/{first['id']}/complete", {"token": token(receiver)})
                (second,) = await wait_until(dispatched)
                assert second["id"] != first["id"]
        finally:
            await other.close()
