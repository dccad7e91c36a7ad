"""Limits of a target: its jobs are inserted into its own queue, by every path, and their claims are limited there."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import insert

from timebell.model.limits import Limits
from timebell.model.payload import encode
from timebell.model.routes import named_target, named_target_route
from timebell.store.jobs import queue_limits, start_on_insert, target_queues
from timebell.store.schedules import schedules as verbs
from timebell.store.schema import targets
from timebell.store.transaction import Transaction

from .helpers import ALL_ROUTES, NODE, T0, Store, after, build_job, create, everything, job, lane, put, schedule, stored

QUEUE = "target:default/crm"
TARGET = {"target": encode(named_target("http", "crm"), "target"), "route": named_target_route("http")}

TWO = Limits(concurrency=2)


async def limit(store: Store, limits: Limits | None = TWO) -> None:
    await store.run(target_queues.set_target_limits, "default", "crm", limits)


async def create_target(store: Store) -> None:
    def create(tx: Transaction) -> None:
        row: dict[str, Any] = {"tenant_id": "default", "name": "crm", "kind": "http", "options": "{}"}
        tx.execute(insert(targets).values(**row, created_at=after(), updated_at=after()))

    await store.run(create)


async def queues_of(store: Store) -> list[str]:
    return sorted(one.queue for one in await everything(store))


@pytest.mark.parametrize("bulk", [False, True])
@stored
async def test_jobs_without_a_queue_are_inserted_into_the_queue_of_their_target(store: Store, bulk: bool) -> None:
    await create(store, job(**TARGET), bulk=bulk)
    await limit(store)
    await create(store, job(**TARGET), job(**TARGET, queue="own"), job(tenant_id="other", **TARGET), job(), bulk=bulk)
    # The first job was created before the limits; another tenant has another target of this name.
    assert await queues_of(store) == sorted([QUEUE, QUEUE, "own", "default", "default"])


@stored
async def test_claims_stay_within_the_limits_of_the_target(store: Store) -> None:
    await limit(store)
    await create(store, *(job(**TARGET) for _ in range(3)))

    async def claim() -> int:
        claimed = await store.run(queue_limits.claim_limited, lane(QUEUE), ALL_ROUTES, NODE, 10, T0)
        return len(claimed)

    assert [await claim(), await claim()] == [2, 0]
    await limit(store, Limits(concurrency=3))
    assert await claim() == 1


@stored
async def test_jobs_of_schedules_follow_the_limits_of_their_target(store: Store) -> None:
    await create_target(store)
    made = await put(store, schedule(target={"name": "crm"}, overlap="allow"))
    assert made.action.queue == "default"
    slots = start_on_insert.SlotReservation(NODE, ALL_ROUTES, 10)

    async def fire(minute: int) -> int:
        fired = await store.run(verbs.fire_due_schedules, build_job, after(minutes=minute), 500, slots)
        return len(fired.started_attempts)

    assert (await fire(1), await queues_of(store)) == (1, ["default"])
    await limit(store, Limits(concurrency=1))
    assert (await fire(2), await queues_of(store)) == (0, ["default", QUEUE])  # a limited queue is left to claims
    await limit(store, None)
    assert (await fire(3), await queues_of(store)) == (1, ["default", "default", QUEUE])


@stored
async def test_removing_limits_that_do_not_exist_changes_nothing(store: Store) -> None:
    await limit(store, None)
    await create(store, job(**TARGET))
    assert await queues_of(store) == ["default"]


def test_long_names_have_a_queue_of_their_own() -> None:
    tenant, name = "t" * 200, "n" * 100
    queue = target_queues.target_queue(tenant, name)
    assert len(queue) <= target_queues.MAX_NAME_CHARACTERS
    assert queue != target_queues.target_queue(tenant, name[:-1])
    assert not target_queues.is_visible(queue, "t")
    assert target_queues.is_visible("default", "t")
    assert target_queues.is_visible("target:t/n", "t")
    assert not target_queues.is_visible("target:t/u/n", "t")
