"""Conditions, queries and quotas that are checked before a job is delivered."""

from __future__ import annotations

from typing import Any

from timebell.features import FEATURES
from timebell.model.preconditions import Preconditions, serialize
from timebell.store.jobs import pre_delivery_check, repository
from timebell.store.jobs.pre_delivery_check import DeliveryCheck, QueryResult
from timebell.store.tenancy import monthly_quota, tenants

from .helpers import T0, Store, after, claim, create, end, ending, get, job, stored

PRO = [{"field": "plan", "op": "eq", "value": "pro"}]
ASKS: dict[str, Any] = {"conditions": serialize(PRO, None)}


@stored
async def test_a_job_keeps_its_condition_through_claim_reschedule_and_completion(store: Store) -> None:
    made = job(run_at=T0, payload='{"plan": "free"}', **ASKS)
    plain = job(run_at=T0)
    await create(store, made, plain)
    assert ((await get(store, made.id)).condition, (await get(store, plain.id)).condition) == (PRO, [])
    moved = await store.run(
        repository.reschedule, "default", made.id, job().id,
        lambda old: {"run_at": after(hours=1), "timezone": old.timezone, "local_time": None, "tzdata": None}, T0,
    )  # fmt: skip
    assert moved is not None
    attempts = {one.id: one for one in await claim(store, after(hours=1))}
    assert attempts[plain.id].conditions is None
    gated = Preconditions.for_job(attempts[moved.id].conditions or "", attempts[moved.id].payload, None)
    assert (gated.fields, gated.unless) == ({"plan": "free"}, None)
    await end(store, *(ending(one, at=after(hours=1)) for one in attempts.values()))
    assert (await get(store, moved.id)).condition == (await get(store, made.id)).condition == PRO


@stored
async def test_jobs_with_unmet_conditions_are_skipped_and_use_no_quota(store: Store) -> None:
    await store.run(tenants.upsert_tenant, "default", {"jobs_per_month": 2}, T0)
    new = [job(run_at=T0) for _ in range(6)]
    await create(store, *new)
    attempts = await claim(store, T0)
    plans = ["free", "pro", "free", "pro", "pro", "pro"]
    asked = [
        DeliveryCheck(
            one.id,
            "default",
            one.kind,
            False,
            Preconditions.for_job(serialize(PRO, None) or "", f'{{"plan": "{plan}"}}', None),
        )
        for one, plan in zip(attempts, plans, strict=True)
    ]
    found = {attempts[1].id: QueryResult(True, {"shift": 7}), attempts[3].id: QueryResult(False, {"shift": 8})}
    ruled = await store.run(pre_delivery_check.decide, asked, T0, found or {}, FEATURES)
    assert [ruled[one.id].reason for one in attempts] == ["condition", "condition", "condition", None, None, "quota"]
    assert ruled[attempts[1].id].verdict == {
        "holds": False, "failed": None, "inputs": {"plan": "pro"},
        "unless": {"found": True, "parameters": {"shift": 7}},
    }  # fmt: skip
    assert (await store.run(monthly_quota.get_monthly_usage, "default", T0)).used == 2
