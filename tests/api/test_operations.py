"""Dead letters and operations: listed, grouped, retried at a rate, discarded; jobs cancelled by filter."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update

from timebell.engine.leader.leader import Leader
from timebell.features import FEATURES
from timebell.ids import new_id, new_ids
from timebell.model.job import Completion, JobState, NewJob
from timebell.model.routes import ALL_ROUTES
from timebell.recurrence.instants import format_instant
from timebell.store.audit import audit_log
from timebell.store.cluster import operations
from timebell.store.jobs import claim, complete, repository
from timebell.store.schema import finished
from timebell.store.transaction import Transaction

from .test_jobs import at
from .web import Web, is_problem, wait_until

Make = Callable[..., Any]


async def fail(web: Web, count: int = 1, code: str = "ValueError", tenant: str = "default", **fields: Any) -> list[str]:
    """Create dead letters as the engine does; return their ids, in the order in which they failed."""
    await web.app.open()
    now = web.app.clock.now()
    due = now - timedelta(minutes=1)  # due even if the clock of the database is slightly behind
    created = [
        NewJob(**{
            "id": id_, "tenant_id": tenant, "topic": "t", "scheduled_at": due, "run_at": due, "timezone": "UTC",
            "created_at": now, "route": "t", **fields,
        })
        for id_ in new_ids(now, count)
    ]  # fmt: skip

    def write(tx: Transaction) -> None:
        repository.create(tx, created, "error")
        mine = {job.id for job in created}
        lane = claim.QueueLane("default", 0, None, None, has_limits=False)
        attempts = [one for one in claim.claim_batch(tx, lane, ALL_ROUTES, new_id(now), 10_000, now) if one.id in mine]
        assert len(attempts) == count
        complete.complete_jobs(tx, [
            Completion(each.id, each.number, JobState.FAILED, now + timedelta(microseconds=n), error=f"bad {n}",
                       code=code)
            for n, each in enumerate(attempts)
        ])  # fmt: skip

    await web.app.store.run(write)
    return [job.id for job in created]


async def dead(web: Web, query: str = "") -> list[dict[str, Any]]:
    return (await web.get(f"/dead-letters?{query}")).json()["items"]  # type: ignore[no-any-return]


async def finished_operation(web: Web, created: Any) -> dict[str, Any]:
    """Wait until the operation of a response is finished and return it."""
    assert created.status_code == 202, created.text
    assert created.headers["location"] == f"/api/v1/operations/{created.json()['id']}"

    async def finished() -> Any:
        seen = (await web.get(f"/operations/{created.json()['id']}")).json()
        return None if seen["state"] == "running" else seen

    return await wait_until(finished)  # type: ignore[no-any-return]


async def test_dead_letters_are_listed_with_the_fields_of_their_job(make: Make) -> None:
    async with make() as web:
        (id_,) = await fail(web, topic="a.b", payload='{"n": 1}')
        (letter,) = await dead(web)
        job = (await web.get(f"/jobs/{id_}")).json()
        assert letter == {**job, "failedAt": job["completedAt"]}
        assert (letter["payload"], letter["errorMessage"], letter["errorCode"]) == ({"n": 1}, "bad 0", "ValueError")
        assert letter["attemptsMade"] == 1
        assert letter["failedAt"] is not None


async def test_dead_letters_are_filtered_grouped_and_paged(make: Make) -> None:
    async with make() as web:
        first = await fail(web, 3, topic="a", schedule_id=None)
        middle = format_instant(web.app.clock.now())
        second = await fail(web, 4, "TIMEOUT", topic="b")
        await fail(web, 1, tenant="other")

        async def found(query: str) -> list[str]:
            return [one["id"] for one in await dead(web, query)]

        assert await found("") == [*second[::-1], *first[::-1]]
        assert (
            await found("topic=a") == await found("errorCode=ValueError") == await found(f"to={middle}") == first[::-1]
        )
        assert await found(f"from={middle}&topic=b") == second[::-1]
        assert await found(f"scheduleId={new_id(web.app.clock.now())}") == []
        seen, cursor = [], ""
        while cursor is not None:
            page = (await web.get(f"/dead-letters?limit=2{cursor and '&cursor=' + cursor}")).json()
            assert len(page["items"]) <= 2
            seen += [one["id"] for one in page["items"]]
            cursor = page["nextCursor"]
        assert seen == [*second[::-1], *first[::-1]]
        for by, values in (("topic", ["b", "a"]), ("error", ["TIMEOUT", "ValueError"])):
            grouped = (await web.get(f"/dead-letters?groupBy={by}")).json()
            assert [(one[by], one["count"]) for one in grouped["items"]] == list(
                zip(values, [4, 3], strict=True)
            )  # fmt: skip
            assert [one["latest"]["id"] for one in grouped["items"]] == [second[-1], first[-1]]
            assert grouped["items"][0]["lastFailedAt"] == grouped["items"][0]["latest"]["failedAt"]
            assert grouped["total"] == 7
        for query in ("cursor=x", "cursor=1.x", f"cursor={'9' * 40}.{first[0]}"):
            is_problem(await web.get(f"/dead-letters?{query}"), 422, "INVALID_CURSOR")
        is_problem(await web.get("/dead-letters?scheduleId=x"), 422, "INVALID_FILTER")
        is_problem(await web.get("/dead-letters?from=yesterday"), 422, "INVALID_INSTANT")


async def test_dead_letters_of_one_instant_are_listed_page_by_page(make: Make) -> None:
    async with make() as web:
        failed = await fail(web, 5)
        at_once = update(finished).where(finished.c.id.in_(failed)).values(finished_at=web.app.clock.now())
        await web.app.store.run(lambda tx: tx.execute(at_once) and None)
        seen, cursor = [], ""
        while cursor is not None:
            page = (await web.get(f"/dead-letters?limit=2{cursor and '&cursor=' + cursor}")).json()
            seen += [one["id"] for one in page["items"]]
            cursor = page["nextCursor"]
        assert seen == failed[::-1]


async def test_a_retry_operation_retries_only_matching_jobs(make: Make) -> None:
    async with make() as web:
        wanted, other = await fail(web, 450, topic="a"), await fail(web, 2, topic="b")
        dry = await web.post("/dead-letters/retry", {"filter": {"topic": "a"}, "dryRun": True})
        assert (dry.status_code, dry.json()) == (200, {"dryRun": True, "count": 450})
        assert (await web.get("/operations")).json()["items"] == []
        async with web.app.running(heartbeat=0.1):
            created = await web.post("/dead-letters/retry", {"filter": {"topic": "a"}})
            assert created.json()["spec"] == {"filter": {"topic": "a"}}
            ended = await finished_operation(web, created)
        assert (ended["state"], ended["errors"]) == ("completed", [])
        assert ended["progress"] | {"rate": None} == {
            "done": 450, "total": 450, "failed": 0, "skipped": 0, "rate": None, "etaSeconds": None,
        }  # fmt: skip
        assert {one["id"] for one in await dead(web)} == set(other)
        for id_ in (wanted[0], wanted[-1]):
            job = (await web.get(f"/jobs/{id_}")).json()
            assert (job["status"], job["attemptsMade"]) == ("pending", 0)
        records = list(await web.app.store.run(audit_log.list_records, "default", 50, None))
        assert [(one.action, one.subject) for one in records] == [("dead_letters.retry", ended["id"])]


async def test_a_job_that_fails_again_is_retried_once(make: Make) -> None:
    async with make() as web:
        attempted: list[str] = []

        @web.app.on("t", retry={"attempts": 1})
        async def broken(event: Any) -> None:
            attempted.append(event.job_id)
            raise ValueError("still")

        ids = await fail(web, 20)
        async with web.app.running(heartbeat=0.1) as service:
            ended = await finished_operation(web, await web.post("/dead-letters/retry", {"filter": {}, "rate": 100}))
            await service.wait_until_idle()
        assert ended["progress"]["done"] == 20
        assert sorted(attempted) == sorted(ids)
        assert len(await dead(web)) == 20


async def test_the_rate_is_respected(make: Make) -> None:
    async with make() as web:
        await fail(web, 30)
        async with web.app.running(heartbeat=0.1):
            began = web.app.clock.monotonic()
            ended = await finished_operation(web, await web.post("/dead-letters/retry", {"filter": {}, "rate": 20}))
            took = web.app.clock.monotonic() - began
        assert ended["progress"]["done"] == 30
        assert took >= 1.4  # 30 at 20 a second
        assert ended["progress"]["rate"] <= 21


async def test_a_key_in_use_is_reported(make: Make) -> None:
    async with make() as web:
        keyed = (await fail(web, 1, key="k"))[0]
        free = (await fail(web, 1, key="free"))[0]
        holder = (
            await web.post("/jobs", {"topic": "x", "timezone": "UTC", "runAt": at(web, days=1), "key": "k"})
        ).json()
        async with web.app.running(heartbeat=0.1):
            ended = await finished_operation(web, await web.post("/dead-letters/retry", {"filter": {}}))
        assert (ended["progress"]["done"], ended["progress"]["failed"]) == (1, 1)
        assert ended["errors"] == [{"jobId": keyed, "code": "KEY_IN_USE", "detail": ended["errors"][0]["detail"]}]
        assert holder["id"] in ended["errors"][0]["detail"]
        assert (await web.get(f"/jobs/{free}")).json()["status"] == "pending"
        assert [one["id"] for one in await dead(web)] == [keyed]


async def test_discarded_jobs_stay_in_the_history(make: Make) -> None:
    async with make() as web:
        ids = await fail(web, 210, topic="a")
        await fail(web, 1, topic="b")
        async with web.app.running(heartbeat=0.1):
            ended = await finished_operation(web, await web.post("/dead-letters/discard", {"filter": {"topic": "a"}}))
        assert ended["progress"]["done"] == 210
        assert [one["topic"] for one in await dead(web)] == ["b"]
        job = (await web.get(f"/jobs/{ids[0]}")).json()
        assert (job["status"], job["reason"], job["errorMessage"]) == ("failed", "discarded", "bad 0")
        assert len((await web.get("/jobs?status=failed&topic=a&limit=500")).json()["items"]) == 210
        again = await web.post(f"/jobs/{ids[0]}/retry")
        assert (again.status_code, again.json()["status"]) == (200, "pending")


async def test_a_crash_in_a_step_loses_and_repeats_nothing(make: Make) -> None:
    async with make() as web:
        await fail(web, 500)
        id_ = (await web.post("/dead-letters/retry", {"filter": {}})).json()["id"]
        store, now = web.app.store, web.app.clock.now

        def crashing(tx: Transaction) -> None:
            operations.advance(tx, id_, now(), FEATURES)
            raise SystemExit  # before the commit

        for _ in range(2):
            with pytest.raises(SystemExit):
                await store.run(crashing)
            assert (await web.get(f"/operations/{id_}")).json()["progress"]["done"] == 0
        await store.run(operations.advance, id_, now(), FEATURES)
        with pytest.raises(SystemExit):
            await store.run(crashing)
        seen = (await web.get(f"/operations/{id_}")).json()
        assert (seen["progress"]["done"], seen["state"]) == (200, "running")
        assert len(await dead(web, "limit=500")) == 300
        while await store.run(operations.advance, id_, now(), FEATURES) is not None:
            pass
        seen = (await web.get(f"/operations/{id_}")).json()
        assert (seen["progress"]["done"], seen["state"]) == (500, "completed")
        assert await dead(web) == []


async def test_only_the_leader_executes_operations(make: Make) -> None:
    async with make() as web:
        await fail(web)
        async with web.app.running(heartbeat=0.1) as service:
            await wait_until(lambda: service.leader.fence)
            follower = Leader(service.node)
            await web.post("/dead-letters/retry", {"filter": {}, "rate": 0.001})
            assert await follower.operations.step() is None
            assert await service.leader.operations.step() is not None


async def test_an_operation_can_be_cancelled(make: Make) -> None:
    async with make() as web:
        await fail(web, 50)
        async with web.app.running(heartbeat=0.1):
            created = (await web.post("/dead-letters/retry", {"filter": {}, "rate": 1})).json()

            async def some() -> bool:
                return (await web.get(f"/operations/{created['id']}")).json()["progress"]["done"] > 0  # type: ignore[no-any-return]

            await wait_until(some)
            running = (await web.get("/operations?state=running&kind=retry")).json()["items"]
            assert running[0]["progress"]["etaSeconds"] > 0
            stopped = (await web.post(f"/operations/{created['id']}/cancel")).json()
            assert (stopped["state"], stopped["completedAt"] is not None) == ("cancelled", True)
            again = (await web.post(f"/operations/{created['id']}/cancel")).json()
            assert again == stopped
            assert stopped["progress"]["done"] + len(await dead(web)) == 50
        is_problem(await web.post(f"/operations/{new_id(web.app.clock.now())}/cancel"), 404, "OPERATION_NOT_FOUND")


async def test_operations_of_other_tenants_are_not_found(make: Make) -> None:
    async with make(open_here=False) as web:
        ours, theirs = await web.key("operator", "ours"), await web.key("operator", "theirs")
        await fail(web, 1, tenant="ours")
        assert (await web.get("/dead-letters", key=theirs)).json()["items"] == []
        created = (await web.post("/dead-letters/retry", {"filter": {}}, key=ours)).json()
        assert created["progress"]["total"] == 1
        is_problem(await web.get(f"/operations/{created['id']}", key=theirs), 404, "OPERATION_NOT_FOUND")
        is_problem(await web.post(f"/operations/{created['id']}/cancel", key=theirs), 404, "OPERATION_NOT_FOUND")
        assert (await web.get("/operations", key=theirs)).json()["items"] == []
        viewer = await web.key("viewer", "ours")
        is_problem(await web.post("/dead-letters/discard", {"filter": {}}, key=viewer), 403, "ROLE_TOO_LOW")


async def test_jobs_are_cancelled_by_filter(make: Make) -> None:
    async with make() as web:
        for n in range(5):
            body = {"topic": f"t.{n % 2}", "timezone": "UTC", "runAt": at(web, days=1), "metadata": {"ownerId": "ana"}}
            await web.post("/jobs", body)
        is_problem(await web.post("/jobs/cancel", {"filter": {}}), 422, "FILTER_MISSING")
        request_body = {"filter": {"topic": "t.0", "ownerId": "ana"}}
        assert (await web.post("/jobs/cancel", {**request_body, "dryRun": True})).json() == {"dryRun": True, "count": 3}
        created = await web.post("/jobs/cancel", request_body)
        assert created.json()["spec"] == request_body
        late = (await web.post("/jobs", {"topic": "t.0", "timezone": "UTC", "runAt": at(web, days=1),
                                         "metadata": {"ownerId": "ana"}})).json()  # fmt: skip
        async with web.app.running(heartbeat=0.1):
            ended = await finished_operation(web, created)
        assert (ended["progress"]["done"], ended["progress"]["total"]) == (3, 3)
        assert (await web.get(f"/jobs/{late['id']}")).json()["status"] == "pending"
        assert len((await web.get("/jobs?status=cancelled")).json()["items"]) == 3
