"""Changes of items, jobs of triggers and months of tenants, on every store."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select

from timebell.ids import new_id
from timebell.model.job import Kind
from timebell.model.operation import OperationState
from timebell.model.schedule import Action
from timebell.model.trigger import Change, Observed, Rule, Source, Trigger, offsets_of
from timebell.store.cluster import operations
from timebell.store.jobs import pre_delivery_check
from timebell.store.jobs.pre_delivery_check import Asked, Ruling
from timebell.store.schema import jobs as jobs_table
from timebell.store.tenancy import monthly_quota, tenants
from timebell.store.triggers import planned_firings, sources, triggers

from .helpers import T0, Store, after, claim, end, ending, everything, execute, get, started, stored

HOUR = after(hours=1)


async def source(store: Store, name: str = "shifts", **fields: Any) -> Source:
    made = Source(id=new_id(T0), tenant_id="default", name=name, kind="webhook", created_at=T0, updated_at=T0, **fields)
    return await store.run(sources.put, made, T0, replace=True)


async def trigger(store: Store, name: str = "start", at: datetime = T0, **rule: Any) -> Trigger:
    wanted = Trigger(
        id=new_id(T0), tenant_id="default", name=name, source_id="", source="shifts",
        rule=Rule(**{"column": "start_at", **rule}), action=Action(topic="t", payload={"say": name}), created_at=T0,
        updated_at=T0,
    )  # fmt: skip
    made, _ = await store.run(triggers.put, wanted, at, replace=True)
    return made


async def scanned(store: Store, at: datetime = T0) -> None:
    for id_ in await store.run(operations.running):
        while await store.run(operations.advance, id_, at) is not None:
            pass


async def say(
    store: Store, home: Source, version: int | None, start: Any, *, key: str = "42", at: datetime = T0, **more: Any
) -> Observed:
    value = start.isoformat() if isinstance(start, datetime) else start
    fields = None if start == "gone" else {"start_at": value, **more}
    return await store.run(planned_firings.observe, home, [Change(key, version, fields)], at)


async def pending(store: Store) -> list[tuple[str | None, datetime]]:
    rows = await execute(store, select(jobs_table.c.key, jobs_table.c.run_at).order_by(jobs_table.c.run_at))
    return [(row.key, row.run_at) for row in rows]


async def ruled(store: Store, *ids: str, at: datetime = HOUR) -> dict[str, Ruling]:
    return await store.run(pre_delivery_check.rule, [Asked(id_, "default", Kind.TRIGGER, False) for id_ in ids], at)


@stored
async def test_an_item_has_a_job_at_its_instant(store: Store) -> None:
    """S3-02, S3-09, S3-27: an absolute instant, and what its job carries."""
    home, made = await source(store), await trigger(store)
    assert await say(store, home, 1, HOUR) == Observed(changed=1, made=1)
    (planned,) = await everything(store)
    assert (planned.key, planned.kind) == (f"trigger__{made.id}__42__0", Kind.TRIGGER)
    assert planned.run_at == planned.scheduled_at == HOUR
    assert planned.payload == {
        "triggerId": made.id, "itemId": "42", "boardId": "shifts", "tenantId": "default", "action": {"say": "start"},
        "scheduledAt": "2027-03-01T13:00:00Z", "offset": "0",
    }  # fmt: skip


@stored
async def test_an_edit_moves_it_and_links_both_jobs(store: Store) -> None:
    """S3-33, S3-34; S4-F5: the moved reminder is made, and the old one does not go out."""
    home, _ = await source(store), await trigger(store)
    await say(store, home, 1, HOUR)
    (old,) = await everything(store)
    assert await say(store, home, 2, after(hours=2)) == Observed(changed=1, made=1, cancelled=1)
    was, new = await everything(store)
    assert (was.id, was.state, was.reason, was.replaced_by) == (old.id, "cancelled", "rescheduled", new.id)
    assert (new.state, new.run_at, new.replaces, new.key) == ("pending", after(hours=2), old.id, old.key)


@stored
async def test_what_is_not_newer_changes_nothing_whatever_its_order(store: Store) -> None:
    """S3-F2: an old date never overwrites a newer one."""
    home, _ = await source(store), await trigger(store)
    changes = [Change("42", version, {"start_at": after(hours=version).isoformat()}) for version in range(1, 21)]
    for shuffled in (changes[::-1], changes, changes[10:] + changes[:10]):
        for change in shuffled:
            await store.run(planned_firings.observe, home, [change], T0)
        await store.run(planned_firings.observe, home, shuffled, T0)
    assert [at for _, at in await pending(store)] == [after(hours=20)]
    assert len(await everything(store)) == 1
    assert (await say(store, home, 3, "gone")).stale == 1
    assert (await say(store, home, 21, after(hours=20))).same == 1


@stored
async def test_clearing_deleting_and_past_dating_cancel_and_an_old_change_brings_nothing_back(store: Store) -> None:
    """S3-12, S3-26, S3-36."""
    home, _ = await source(store), await trigger(store)
    for version, ended in ((10, None), (20, "gone"), (30, after(hours=-1)), (40, "soon")):
        assert (await say(store, home, version, HOUR)).made == 1
        assert (await say(store, home, version + 1, ended)).cancelled == 1
        assert await pending(store) == []
        assert (await say(store, home, version, HOUR)).stale == 1
    assert {one.reason for one in await everything(store)} == {"withdrawn"}


@stored
async def test_what_is_learnt_of_late_fires_within_the_grace(store: Store) -> None:
    """S3-F4, S4-30: 40 s late is no reminder lost."""
    home, _ = await source(store), await trigger(store, grace=60.0)
    assert (await say(store, home, 1, after(seconds=-40))).made == 1
    assert (await say(store, home, 1, after(seconds=-61), key="43")).late == 1
    assert [at for _, at in await pending(store)] == [after(seconds=-40)]


@stored
async def test_an_instant_fires_once_and_a_new_date_fires_again(store: Store) -> None:
    """S3-F1: what has fired is in nobody's way."""
    home, _ = await source(store), await trigger(store)
    await say(store, home, 1, HOUR)
    (attempt,) = await claim(store, HOUR)
    assert (await ruled(store, attempt.id))[attempt.id].state is None
    await end(store, ending(attempt, at=HOUR))
    for version in (2, 3):
        assert (await say(store, home, version, HOUR, at=HOUR, title=str(version))).made == 0
    assert (await say(store, home, 4, after(hours=2), at=HOUR)).made == 1
    assert (await say(store, home, 5, HOUR, at=HOUR)) == Observed(changed=1, cancelled=1)
    assert (await say(store, home, 6, after(hours=3), at=HOUR)).made == 1


@stored
async def test_each_offset_and_recipient_has_a_job_of_its_own(store: Store) -> None:
    """S4-08, S4-10, S4-25, S4-32: one for each person and reminder."""
    home = await source(store)
    await trigger(store, offsets=offsets_of(["-15m", "0"]), recipients="users")
    await say(store, home, 1, HOUR, users=["ana", "bo"])
    made = await everything(store)
    assert sorted((one.owner_id, one.payload["recipient"], one.run_at) for one in made) == sorted(
        (who, who, at) for who in ("ana", "bo") for at in (HOUR, HOUR - timedelta(minutes=15))
    )
    assert await say(store, home, 2, HOUR, users=["bo", "cy"]) == Observed(changed=1, made=2, cancelled=2)
    assert sorted({one.owner_id or "" for one in await everything(store) if one.state == "pending"}) == ["bo", "cy"]


@stored
async def test_several_triggers_on_one_column_all_work(store: Store) -> None:
    """S3-32, S3-35."""
    home = await source(store)
    for name in ("one", "two", "three"):
        await trigger(store, name)
    assert (await say(store, home, 1, HOUR)).made == 3
    assert (await say(store, home, 2, after(hours=2))) == Observed(changed=1, made=3, cancelled=3)


@stored
async def test_a_new_trigger_plans_for_the_items_there_are(store: Store) -> None:
    """S3-22, S3-28; S3-F7: what is edited during the scan is not missed."""
    home = await source(store)
    for number in range(450):
        await say(store, home, 1, HOUR if number % 10 else "soon", key=f"{number}")
    await say(store, home, 1, "gone", key="449")
    made = await trigger(store)
    (id_,) = await store.run(operations.running)
    assert await store.run(operations.advance, id_, T0) is not None
    await say(store, home, 2, after(hours=5), key="7")  # meanwhile
    await scanned(store)
    done = await store.run(operations.find, "default", id_)
    assert done is not None
    assert (done.state, done.done, done.skipped) == (OperationState.COMPLETED, 405, 45)
    assert len(await pending(store)) == 405
    await store.run(triggers.scan, made, T0, None)
    await scanned(store)
    assert len(await pending(store)) == 405


@stored
async def test_an_edit_of_a_trigger_makes_again_what_is_to_come(store: Store) -> None:
    home, made = await source(store), await trigger(store, offsets=offsets_of(["-15m", "0"]))
    await say(store, home, 1, HOUR)
    again = await trigger(store, offsets=offsets_of(["0", "+1d"]))
    assert (again.id, again.revision) == (made.id, 2)
    await scanned(store)
    assert [at for _, at in await pending(store)] == [HOUR, after(hours=25)]
    _, begun = await store.run(triggers.put, again, T0, replace=True)
    assert begun is None


@stored
async def test_a_deleted_trigger_takes_its_jobs_along(store: Store) -> None:
    home, _ = await source(store), await trigger(store)
    await scanned(store)
    await say(store, home, 1, HOUR)
    await say(store, home, 1, HOUR, key="43")
    (attempt, _) = await claim(store, HOUR)
    await store.run(triggers.remove, "default", "start", T0, None)
    assert (await ruled(store, attempt.id))[attempt.id].state == "cancelled"
    await scanned(store)
    assert await pending(store) == [(None, HOUR)] * 2  # both run: their gates cancel them
    assert await execute(store, select(planned_firings.firings)) == []


@stored
async def test_a_job_that_has_started_does_not_stand_in_the_way_of_the_new_date(store: Store) -> None:
    """S3-F8: a cancel against a job that has started has one winner."""
    home, _ = await source(store), await trigger(store)
    await say(store, home, 1, HOUR)
    (attempt,) = await claim(store, HOUR)
    assert await say(store, home, 2, after(hours=2), at=HOUR) == Observed(changed=1, made=1)
    ruling = (await ruled(store, attempt.id))[attempt.id]
    assert (ruling.state, ruling.reason) == ("cancelled", "withdrawn")
    assert [at for _, at in await pending(store)] == [HOUR, after(hours=2)]


@stored
async def test_the_gate_asks_the_condition_of_the_fields_as_they_are_now(store: Store) -> None:
    """S4-33, S4-64: the verdict and its inputs are kept."""
    from timebell.model import condition

    home, _ = await source(store), await trigger(store, condition=condition.read({"status": "active"}))
    await say(store, home, 1, HOUR, status="active")
    await say(store, home, 1, HOUR, status="active", key="43")
    await say(store, home, 2, HOUR, status="done", key="43")
    first, second = sorted(await claim(store, HOUR), key=lambda one: one.payload)
    rulings = await ruled(store, first.id, second.id)
    assert rulings[first.id].state is None
    assert rulings[first.id].verdict == {"holds": True, "failed": None, "inputs": {"status": "active"}}
    assert (rulings[second.id].state, rulings[second.id].reason) == ("skipped", "condition")
    assert rulings[second.id].verdict["failed"]["field"] == "status"  # type: ignore[index]


@stored
async def test_paused_and_orphaned_ones_are_skipped_until_they_are_back(store: Store) -> None:
    home, _ = await source(store), await trigger(store)
    await say(store, home, 1, HOUR)
    (attempt,) = await claim(store, HOUR)
    await store.run(triggers.enable, "default", "start", "holiday", T0, on=False)
    assert (await ruled(store, attempt.id))[attempt.id].reason == "paused"
    await store.run(triggers.enable, "default", "start", None, T0, on=True)
    await store.run(sources.orphan, home.id, "Board orphaned (404)", T0)
    ruling = (await ruled(store, attempt.id))[attempt.id]
    assert (ruling.reason, ruling.error) == ("orphaned", "Board orphaned (404)")
    await store.run(sources.orphan, home.id, None, T0)
    assert (await ruled(store, attempt.id))[attempt.id].state is None


@stored
async def test_a_month_has_room_for_its_limit_and_not_for_one_more(store: Store) -> None:
    """S3-40, S3-41, S3-44: reserved at fire time, and skips cost nothing."""
    await store.run(tenants.put, "default", {"jobs_per_month": 50}, T0)
    assert await store.run(monthly_quota.metered) == {"default"}
    ids = [(await started(store)).id for _ in range(100)]
    asked = [[Asked(id_, "default", "once", False) for id_ in ids[at : at + 10]] for at in range(0, 100, 10)]
    rulings: dict[str, Ruling] = {}
    for found in await asyncio.gather(*(store.run(pre_delivery_check.rule, some, T0) for some in asked)):
        rulings |= found
    assert sum(one.state is None for one in rulings.values()) == 50
    refused = [one for one in rulings.values() if one.state is not None]
    assert {(one.state, one.reason, one.error) for one in refused} == {
        ("skipped", "quota", "Monthly limit reached (50/50)")
    }
    assert (await store.run(monthly_quota.of, "default", T0)).used == 50
    passed = next(id_ for id_, one in rulings.items() if one.state is None)
    again = await store.run(pre_delivery_check.rule, [Asked(passed, "default", "once", False)], T0)
    assert again[passed].state is None  # charged once, however often it is tried
    assert (await store.run(monthly_quota.of, "default", T0)).used == 50


@stored
async def test_a_month_begins_in_the_zone_of_the_tenant(store: Store) -> None:
    """S3-F5: the month is the tenant's."""
    await store.run(tenants.put, "default", {"jobs_per_month": 1}, T0, "Pacific/Auckland")
    late, early = datetime.fromisoformat("2027-03-31T10:59:59Z"), datetime.fromisoformat("2027-03-31T11:00:00Z")
    for at, month in ((late, "2027-03"), (early, "2027-04")):
        attempt = await started(store)
        assert (await store.run(pre_delivery_check.rule, [Asked(attempt.id, "default", "once", False)], at))[
            attempt.id
        ].state is None
        found = await store.run(monthly_quota.of, "default", at)
        assert (found.month, found.used, found.timezone) == (month, 1, "Pacific/Auckland")
    assert (await store.run(monthly_quota.of, "default", late)).ends_at == early


@stored
async def test_many_say_different_things_of_one_item_at_once(store: Store) -> None:
    """S3-37: never two pending jobs of one item for one trigger."""
    home, _ = await source(store), await trigger(store)
    await asyncio.gather(*(say(store, home, version, after(hours=version)) for version in range(1, 31)))
    assert [at for _, at in await pending(store)] == [after(hours=30)]


@stored
async def test_what_was_over_long_ago_is_forgotten_and_what_is_to_come_is_not(store: Store) -> None:
    home, _ = await source(store), await trigger(store)
    await say(store, home, 1, HOUR)
    await say(store, home, 1, after(days=90), key="43")
    await say(store, home, 1, after(days=90), key="44")
    await say(store, home, 2, "gone", key="44")
    (attempt,) = await claim(store, HOUR)
    await end(store, ending(attempt, at=HOUR))
    assert (
        await store.run(planned_firings.prune, after(days=59), 100) == 1
    )  # 44 had nothing fired, and is planned no more
    assert await store.run(planned_firings.prune, after(days=61), 100) == 2
    assert {one.key for one in await store.run(sources.page_of_items, home.id, 10, None)} == {"42", "43"}
    assert await say(store, home, 2, HOUR, title="edited", at=after(days=61)) == Observed(changed=1, late=1)
    assert len(await pending(store)) == 1


@stored
async def test_a_person_who_is_erased_is_gone_from_items_and_firings(store: Store) -> None:
    from timebell.store.jobs import erasure

    home, _ = await source(store), await trigger(store, recipients="users")
    await say(store, home, 1, HOUR, users=["ana", "bo"], note="both")
    await say(store, home, 1, HOUR, key="43", users="ana", note="hers")
    await say(store, home, 1, HOUR, key="44", users=["joana"], note="of somebody else")
    erased = await store.run(erasure.erase, "default", "ana", T0)
    assert (erased.prevented, erased.items) == (2, 2)
    known = {one.key: one.fields for one in await store.run(sources.page_of_items, home.id, 10, None)}
    assert known["42"] == {"start_at": HOUR.isoformat(), "users": ["bo"], "note": "both"}
    assert known["43"] is None
    assert (known["44"] or {})["users"] == ["joana"]
    left = await execute(
        store, select(planned_firings.firings.c.recipient).order_by(planned_firings.firings.c.recipient)
    )
    assert [row.recipient for row in left] == ["bo", "joana"]
    assert (await say(store, home, 1, HOUR, key="43", users="ana")).stale == 1
    assert not [one for one in await everything(store) if one.owner_id == "ana" or one.payload == "ana"]
    assert {one.owner_id for one in await everything(store) if one.state == "pending"} == {"bo", "joana"}


@stored
async def test_a_job_of_a_trigger_that_is_moved_by_hand_is_a_one_shot(store: Store) -> None:
    from timebell.store.jobs import repository

    home, _ = await source(store), await trigger(store)
    await say(store, home, 1, HOUR)
    (planned,) = await everything(store)
    moved = new_id(T0)
    await store.run(repository.reschedule, None, planned.id, moved, lambda zone: {"run_at": HOUR, "timezone": zone}, T0)
    assert (await get(store, moved)).kind is Kind.ONCE
