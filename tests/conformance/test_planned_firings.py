"""Planned firings of triggers: changes of items, the jobs they create, and monthly quotas of tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete, select, update

from timebell.features import FEATURES
from timebell.features.triggers.model.item_history import explain_item
from timebell.features.triggers.model.trigger import (
    ChangeSummary,
    ItemChange,
    Offset,
    Source,
    Trigger,
    TriggerRule,
    epoch_micros,
    parse_offsets,
)
from timebell.features.triggers.store import item_changes, item_history, sources, tables, trigger_scans, triggers
from timebell.features.triggers.store.firing_audit import FiringAudit, audit_page
from timebell.features.triggers.store.planned_firings import load_firings, lock_items
from timebell.ids import new_id
from timebell.model.job import JobState, Kind
from timebell.model.operation import OperationState
from timebell.model.payload import encode
from timebell.model.schedule import Action
from timebell.store.cluster import operations
from timebell.store.jobs import dead_letters, pre_delivery_check
from timebell.store.jobs.pre_delivery_check import Decision, DeliveryCheck
from timebell.store.schema import jobs as jobs_table
from timebell.store.tenancy import monthly_quota, tenants

from .helpers import T0, Store, after, claim, create, end, ending, everything, execute, get, job, started, stored
from .test_history_plans import count_reads

HOUR = after(hours=1)


async def source(store: Store, name: str = "shifts", **fields: Any) -> Source:
    made = Source(id=new_id(T0), tenant_id="default", name=name, kind="webhook", created_at=T0, updated_at=T0, **fields)
    return await store.run(sources.upsert_source, made, T0, replace=True)


async def trigger(store: Store, name: str = "start", at: datetime = T0, **rule: Any) -> Trigger:
    wanted = Trigger(
        id=new_id(T0), tenant_id="default", name=name, source_id="", source="shifts",
        rule=TriggerRule(**{"column": "start_at", **rule}), action=Action(topic="t", payload={"say": name}),
        created_at=T0, updated_at=T0,
    )  # fmt: skip
    made, _ = await store.run(triggers.upsert_trigger, wanted, at, replace=True)
    return made


async def scanned(store: Store, at: datetime = T0) -> None:
    for id_ in await store.run(operations.list_running):
        while await store.run(operations.advance, id_, at, FEATURES) is not None:
            pass


async def change_item(
    store: Store, home: Source, version: int | None, start: Any, *, key: str = "42", at: datetime = T0, **more: Any
) -> ChangeSummary:
    value = start.isoformat() if isinstance(start, datetime) else start
    fields = None if start == "gone" else {"start_at": value, **more}
    return await store.run(item_changes.apply_changes, home, [ItemChange(key, version, fields)], at)


async def pending(store: Store) -> list[tuple[str | None, datetime]]:
    rows = await execute(store, select(jobs_table.c.key, jobs_table.c.run_at).order_by(jobs_table.c.run_at))
    return [(row.key, row.run_at) for row in rows]


async def decide_checks(store: Store, *ids: str, at: datetime = HOUR) -> dict[str, Decision]:
    return await store.run(
        pre_delivery_check.decide, [DeliveryCheck(id_, "default", Kind.TRIGGER, False) for id_ in ids], at, {}, FEATURES
    )


@stored
async def test_an_item_has_a_job_at_its_instant(store: Store) -> None:
    """The instant is absolute, and the job has the fields of the item."""
    home, made = await source(store), await trigger(store)
    assert await change_item(store, home, 1, HOUR) == ChangeSummary(changed=1, created=1)
    (planned,) = await everything(store)
    assert (planned.key, planned.kind) == (f"trigger__{made.id}__42__0", Kind.TRIGGER)
    assert planned.run_at == planned.scheduled_at == HOUR
    assert planned.payload == {
        "triggerId": made.id, "itemId": "42", "boardId": "shifts", "tenantId": "default", "action": {"say": "start"},
        "scheduledAt": "2027-03-01T13:00:00Z", "offset": "0",
    }  # fmt: skip


@stored
async def test_a_scanned_page_inserts_updates_and_keeps_items(store: Store) -> None:
    """New rows are inserted with their jobs; rows that a newer change has reported are not overwritten."""
    home, _ = await source(store), await trigger(store)
    await change_item(store, home, 5, HOUR, key="same")
    await change_item(store, home, 5, HOUR, key="older")
    await change_item(store, home, 99, HOUR, key="newer")
    start = {"same": HOUR, **dict.fromkeys(("older", "newer", "new", "x" * 201), after(hours=2))}
    page = [ItemChange(key, 50, {"start_at": at.isoformat()}) for key, at in start.items()]
    page.append(ItemChange("unreadable", 50, None, "no date"))
    summary = await store.run(item_changes.apply_read, home, page, T0, "{}", True)
    counts = summary.unchanged, summary.changed, summary.created, summary.cancelled, summary.stale
    assert (*counts, len(summary.rejected)) == (1, 3, 2, 1, 1, 2)
    assert [at for _, at in await pending(store)] == [HOUR, HOUR, after(hours=2), after(hours=2)]
    again = await store.run(item_changes.apply_read, home, page[3:4], T0, "{}", True)
    assert (again.unchanged, again.created) == (1, 0)


@stored
async def test_new_intervals_keep_the_position_of_the_changes_of_a_source(store: Store) -> None:
    """Otherwise a change made meanwhile is found only when the new scan reaches its row."""
    options = {"table": "shifts", "sweepEverySeconds": 200}
    home = await source(store, options=options)
    cursor = encode({"changes": "[7,2]", "began": 1, "after": "5", "rows": 1000})
    await store.run(sources.record_full_scan, home.id, cursor, T0)
    assert (await source(store, options={**options, "sweepEverySeconds": 100})).cursor == '{"changes":"[7,2]"}'
    assert (await source(store, options={**options, "table": "duties"})).cursor is None


@stored
async def test_concurrent_reads_of_new_rows_create_each_job_once(store: Store) -> None:
    """A transaction that inserts the same rows as another one is repeated."""
    home, _ = await source(store), await trigger(store)
    page = [ItemChange(f"{n:03}", 50, {"start_at": HOUR.isoformat()}) for n in range(300)]
    reads = [store.run(item_changes.apply_read, home, page, T0) for _ in range(4)]
    assert sum(summary.created for summary in await asyncio.gather(*reads)) == 300
    assert len({key for key, _ in await pending(store)}) == 300


@stored
async def test_a_read_row_whose_key_has_a_job_has_no_job(store: Store) -> None:
    """A user may have created a job with the key of a firing; the other rows are not affected."""
    home, made = await source(store), await trigger(store)
    await create(store, job(key=f"trigger__{made.id}__b__0"))
    page = [ItemChange(key, 50, {"start_at": HOUR.isoformat()}) for key in "abc"]
    assert (await store.run(item_changes.apply_read, home, page, T0)).created == 2
    query = select(tables.firings.c.item).where(tables.firings.c.job_id.is_not(None)).order_by("item")
    assert [row.item for row in await execute(store, query)] == ["a", "c"]


@stored
async def test_a_page_of_a_growing_source_reads_only_its_own_items(store: Store) -> None:
    """Without statistics, PostgreSQL expects few items in a source, and would read all of them for each page."""
    home, made = await source(store), await trigger(store)
    rows = [ItemChange(f"{n:05}", 50, {"start_at": HOUR.isoformat()}) for n in range(4000)]
    for first in range(0, len(rows), 1000):
        await store.run(item_changes.apply_read, home, rows[first : first + 1000], T0)
    page, keys = rows[:100], [row.key for row in rows[:100]]
    reads: dict[str, Callable[[Any], Any]] = {
        "timebell_items": lambda tx: item_changes.apply_read(tx, home, page, T0),
        "timebell_firings": lambda tx: load_firings(tx, [made.id], keys),
    }
    counts = {table: await store.run(count_reads, read, table) for table, read in reads.items()}
    assert max(counts.values()) < 1000, counts
    assert len(await store.run(lock_items, home.id, keys)) == 100


@stored
async def test_a_read_of_unchanged_rows_writes_nothing(store: Store) -> None:
    """So a delivery does not wait for the disk."""
    home, _ = await source(store), await trigger(store)
    await change_item(store, home, 5, HOUR, key="same")
    await change_item(store, home, 5, "gone", key="gone")
    query = select(tables.items.c.key, tables.items.c.version, tables.items.c.updated_at).order_by("key")
    before = list(await execute(store, query))
    read = [ItemChange("same", 50, {"start_at": HOUR.isoformat()}), ItemChange("gone", 50, None)]
    summary = await store.run(item_changes.apply_read, home, read, after(hours=2))
    assert (summary.unchanged, summary.changed) == (2, 0)
    assert list(await execute(store, query)) == before


@stored
async def test_an_edited_item_moves_its_job_and_links_both_jobs(store: Store) -> None:
    """The moved reminder is created, and the old one is not sent."""
    home, _ = await source(store), await trigger(store)
    await change_item(store, home, 1, HOUR)
    (old,) = await everything(store)
    assert await change_item(store, home, 2, after(hours=2)) == ChangeSummary(changed=1, created=1, cancelled=1)
    was, new = await everything(store)
    assert (was.id, was.state, was.reason, was.replaced_by) == (old.id, "cancelled", "rescheduled", new.id)
    assert (new.state, new.run_at, new.replaces, new.key) == ("pending", after(hours=2), old.id, old.key)


@stored
async def test_changes_that_are_not_newer_have_no_effect_in_any_order(store: Store) -> None:
    """An old date never overwrites a newer one."""
    home, _ = await source(store), await trigger(store)
    changes = [ItemChange("42", version, {"start_at": after(hours=version).isoformat()}) for version in range(1, 21)]
    for shuffled in (changes[::-1], changes, changes[10:] + changes[:10]):
        for change in shuffled:
            await store.run(item_changes.apply_changes, home, [change], T0)
        await store.run(item_changes.apply_changes, home, shuffled, T0)
    assert [at for _, at in await pending(store)] == [after(hours=20)]
    assert len(await everything(store)) == 1
    assert (await change_item(store, home, 3, "gone")).stale == 1
    assert (await change_item(store, home, 21, after(hours=20))).unchanged == 1


@stored
async def test_clearing_deleting_and_past_dating_cancel_the_job_for_good(store: Store) -> None:
    home, _ = await source(store), await trigger(store)
    for version, ended in ((10, None), (20, "gone"), (30, after(hours=-1)), (40, "soon")):
        assert (await change_item(store, home, version, HOUR)).created == 1
        assert (await change_item(store, home, version + 1, ended)).cancelled == 1
        assert await pending(store) == []
        assert (await change_item(store, home, version, HOUR)).stale == 1
    assert {one.reason for one in await everything(store)} == {"withdrawn"}


@stored
async def test_a_late_change_fires_within_the_grace_period(store: Store) -> None:
    """A reminder that is 40 s late is not lost."""
    home, _ = await source(store), await trigger(store, grace=60.0)
    assert (await change_item(store, home, 1, after(seconds=-40))).created == 1
    assert (await change_item(store, home, 1, after(seconds=-61), key="43")).late == 1
    assert [at for _, at in await pending(store)] == [after(seconds=-40)]


@stored
async def test_an_instant_fires_once_and_a_new_date_fires_again(store: Store) -> None:
    """A fired occurrence does not block a new one."""
    home, _ = await source(store), await trigger(store)
    await change_item(store, home, 1, HOUR)
    (attempt,) = await claim(store, HOUR)
    assert (await decide_checks(store, attempt.id))[attempt.id].state is None
    await end(store, ending(attempt, at=HOUR))
    for version in (2, 3):
        assert (await change_item(store, home, version, HOUR, at=HOUR, title=str(version))).created == 0
    assert (await change_item(store, home, 4, after(hours=2), at=HOUR)).created == 1
    assert (await change_item(store, home, 5, HOUR, at=HOUR)) == ChangeSummary(changed=1, cancelled=1)
    assert (await change_item(store, home, 6, after(hours=3), at=HOUR)).created == 1


@stored
async def test_each_offset_and_recipient_has_its_own_job(store: Store) -> None:
    """One job for each recipient and reminder."""
    home = await source(store)
    await trigger(store, offsets=parse_offsets(["-15m", "0"]), recipients="users")
    await change_item(store, home, 1, HOUR, users=["ana", "bo"])
    made = await everything(store)
    assert sorted((one.owner_id, one.payload["recipient"], one.run_at) for one in made) == sorted(
        (who, who, at) for who in ("ana", "bo") for at in (HOUR, HOUR - timedelta(minutes=15))
    )
    assert await change_item(store, home, 2, HOUR, users=["bo", "cy"]) == ChangeSummary(
        changed=1, created=2, cancelled=2
    )
    assert sorted({one.owner_id or "" for one in await everything(store) if one.state == "pending"}) == ["bo", "cy"]


@stored
async def test_several_triggers_on_one_column_all_work(store: Store) -> None:
    home = await source(store)
    for name in ("one", "two", "three"):
        await trigger(store, name)
    assert (await change_item(store, home, 1, HOUR)).created == 3
    assert (await change_item(store, home, 2, after(hours=2))) == ChangeSummary(changed=1, created=3, cancelled=3)


@stored
async def test_a_new_trigger_plans_existing_items(store: Store) -> None:
    """Items edited during the scan are not missed."""
    home = await source(store)
    for number in range(450):
        await change_item(store, home, 1, HOUR if number % 10 else "soon", key=f"{number}")
    await change_item(store, home, 1, "gone", key="449")
    made = await trigger(store)
    (id_,) = await store.run(operations.list_running)
    assert await store.run(operations.advance, id_, T0, FEATURES) is not None
    await change_item(store, home, 2, after(hours=5), key="7")  # meanwhile
    await scanned(store)
    done = await store.run(operations.find_operation, "default", id_)
    assert done is not None
    assert (done.state, done.done, done.skipped) == (OperationState.COMPLETED, 405, 45)
    assert len(await pending(store)) == 405
    await store.run(triggers.start_scan, made, T0, None)
    await scanned(store)
    assert len(await pending(store)) == 405


@stored
async def test_an_edit_of_a_trigger_recreates_its_future_jobs(store: Store) -> None:
    home, made = await source(store), await trigger(store, offsets=parse_offsets(["-15m", "0"]))
    await change_item(store, home, 1, HOUR)
    again = await trigger(store, offsets=parse_offsets(["0", "+1d"]))
    assert (again.id, again.revision) == (made.id, 2)
    await scanned(store)
    assert [at for _, at in await pending(store)] == [HOUR, after(hours=25)]
    _, begun = await store.run(triggers.upsert_trigger, again, T0, replace=True)
    assert begun is None


@stored
async def test_deleting_a_trigger_cancels_its_jobs(store: Store) -> None:
    home, _ = await source(store), await trigger(store)
    await scanned(store)
    await change_item(store, home, 1, HOUR)
    await change_item(store, home, 1, HOUR, key="43")
    (attempt, _) = await claim(store, HOUR)
    await store.run(triggers.delete_trigger, "default", "start", T0, None)
    assert (await decide_checks(store, attempt.id))[attempt.id].state == "cancelled"
    await scanned(store)
    assert await pending(store) == [(None, HOUR)] * 2  # both run, and the check before delivery cancels them
    assert await execute(store, select(tables.firings)) == []


@stored
async def test_a_started_job_does_not_block_the_new_date(store: Store) -> None:
    """Of a cancel and a started job, exactly one wins."""
    home, _ = await source(store), await trigger(store)
    await change_item(store, home, 1, HOUR)
    (attempt,) = await claim(store, HOUR)
    assert await change_item(store, home, 2, after(hours=2), at=HOUR) == ChangeSummary(changed=1, created=1)
    ruling = (await decide_checks(store, attempt.id))[attempt.id]
    assert (ruling.state, ruling.reason) == ("cancelled", "withdrawn")
    assert [at for _, at in await pending(store)] == [HOUR, after(hours=2)]


@stored
async def test_conditions_are_evaluated_with_the_current_fields(store: Store) -> None:
    """The verdict and its inputs are stored."""
    from timebell.model import condition

    home, _ = await source(store), await trigger(store, condition=condition.parse_comparisons({"status": "active"}))
    await change_item(store, home, 1, HOUR, status="active")
    await change_item(store, home, 1, HOUR, status="active", key="43")
    await change_item(store, home, 2, HOUR, status="done", key="43")
    first, second = sorted(await claim(store, HOUR), key=lambda one: one.payload)
    rulings = await decide_checks(store, first.id, second.id)
    assert rulings[first.id].state is None
    assert rulings[first.id].verdict == {"holds": True, "failed": None, "inputs": {"status": "active"}}
    assert (rulings[second.id].state, rulings[second.id].reason) == ("skipped", "condition")
    assert rulings[second.id].verdict["failed"]["field"] == "status"  # type: ignore[index]


@stored
async def test_paused_and_orphaned_firings_are_skipped_until_resumed(store: Store) -> None:
    home, _ = await source(store), await trigger(store)
    await change_item(store, home, 1, HOUR)
    (attempt,) = await claim(store, HOUR)
    await store.run(triggers.set_enabled, "default", "start", "holiday", T0, enabled=False)
    assert (await decide_checks(store, attempt.id))[attempt.id].reason == "paused"
    await store.run(triggers.set_enabled, "default", "start", None, T0, enabled=True)
    await store.run(sources.set_orphaned, home.id, "Board orphaned (404)", T0)
    ruling = (await decide_checks(store, attempt.id))[attempt.id]
    assert (ruling.reason, ruling.error) == ("orphaned", "Board orphaned (404)")
    await store.run(sources.set_orphaned, home.id, None, T0)
    assert (await decide_checks(store, attempt.id))[attempt.id].state is None


@stored
async def test_a_monthly_quota_allows_exactly_its_limit(store: Store) -> None:
    """Quota is reserved at fire time, and skips use none."""
    await store.run(tenants.upsert_tenant, "default", {"jobs_per_month": 50}, T0)
    assert await store.run(monthly_quota.list_metered_tenants) == {"default"}
    ids = [(await started(store)).id for _ in range(100)]
    asked = [[DeliveryCheck(id_, "default", "once", False) for id_ in ids[at : at + 10]] for at in range(0, 100, 10)]
    rulings: dict[str, Decision] = {}
    for found in await asyncio.gather(
        *(store.run(pre_delivery_check.decide, some, T0, {}, FEATURES) for some in asked)
    ):
        rulings |= found
    assert sum(one.state is None for one in rulings.values()) == 50
    refused = [one for one in rulings.values() if one.state is not None]
    assert {(one.state, one.reason, one.error) for one in refused} == {
        ("skipped", "quota", "Monthly limit reached (50/50)")
    }
    assert (await store.run(monthly_quota.get_monthly_usage, "default", T0)).used == 50
    passed = next(id_ for id_, one in rulings.items() if one.state is None)
    again = await store.run(
        pre_delivery_check.decide, [DeliveryCheck(passed, "default", "once", False)], T0, {}, FEATURES
    )
    assert again[passed].state is None  # charged once, however many attempts it has
    assert (await store.run(monthly_quota.get_monthly_usage, "default", T0)).used == 50


@stored
async def test_a_retry_of_a_dead_letter_uses_no_more_of_the_quota(store: Store) -> None:
    await store.run(tenants.upsert_tenant, "default", {"jobs_per_month": 1}, T0)
    attempt = await started(store)
    for _ in range(2):
        check = DeliveryCheck(attempt.id, "default", "once", False)
        decisions = await store.run(pre_delivery_check.decide, [check], T0, {}, FEATURES)
        assert decisions[attempt.id].state is None
        await end(store, ending(attempt, JobState.FAILED))
        assert await store.run(dead_letters.retry, "default", attempt.id, T0)
        (attempt,) = await claim(store)
    assert (await store.run(monthly_quota.get_monthly_usage, "default", T0)).used == 1


@stored
async def test_a_month_starts_in_the_zone_of_the_tenant(store: Store) -> None:
    """Months follow the time zone of the tenant."""
    await store.run(tenants.upsert_tenant, "default", {"jobs_per_month": 1}, T0, "Pacific/Auckland")
    late, early = datetime.fromisoformat("2027-03-31T10:59:59Z"), datetime.fromisoformat("2027-03-31T11:00:00Z")
    for at, month in ((late, "2027-03"), (early, "2027-04")):
        attempt = await started(store)
        assert (
            await store.run(
                pre_delivery_check.decide, [DeliveryCheck(attempt.id, "default", "once", False)], at, {}, FEATURES
            )
        )[attempt.id].state is None
        found = await store.run(monthly_quota.get_monthly_usage, "default", at)
        assert (found.month, found.used, found.timezone) == (month, 1, "Pacific/Auckland")
    assert (await store.run(monthly_quota.get_monthly_usage, "default", late)).ends_at == early


@stored
async def test_simultaneous_changes_of_one_item_leave_one_job(store: Store) -> None:
    """One item never has two pending jobs of one trigger."""
    home, _ = await source(store), await trigger(store)
    await asyncio.gather(*(change_item(store, home, version, after(hours=version)) for version in range(1, 31)))
    assert [at for _, at in await pending(store)] == [after(hours=30)]


@stored
async def test_old_firings_are_deleted_and_future_ones_are_not(store: Store) -> None:
    home, _ = await source(store), await trigger(store)
    await change_item(store, home, 1, HOUR)
    await change_item(store, home, 1, after(days=90), key="43")
    await change_item(store, home, 1, after(days=90), key="44")
    await change_item(store, home, 2, "gone", key="44")
    (attempt,) = await claim(store, HOUR)
    await end(store, ending(attempt, at=HOUR))
    assert (
        await store.run(trigger_scans.prune_firings_and_items, after(days=59), 100) == 1
    )  # 44 has no fired job and is not planned any more
    assert await store.run(trigger_scans.prune_firings_and_items, after(days=61), 100) == 2
    assert {one.key for one in await store.run(sources.list_items, home.id, 10, None)} == {"42", "43"}
    assert await change_item(store, home, 2, HOUR, title="edited", at=after(days=61)) == ChangeSummary(
        changed=1, late=1
    )
    assert len(await pending(store)) == 1


@stored
async def test_erasure_removes_an_owner_from_items_and_firings(store: Store) -> None:
    from timebell.store.jobs import erasure

    home, _ = await source(store), await trigger(store, recipients="users")
    await change_item(store, home, 1, HOUR, users=["ana", "bo"], note="both")
    await change_item(store, home, 1, HOUR, key="43", users="ana", note="hers")
    await change_item(store, home, 1, HOUR, key="44", users=["joana"], note="of somebody else")
    erased = await store.run(erasure.erase, "default", "ana", T0, FEATURES)
    assert (erased.prevented, erased.items) == (2, 2)
    known = {one.key: one.fields for one in await store.run(sources.list_items, home.id, 10, None)}
    assert known["42"] == {"start_at": HOUR.isoformat(), "users": ["bo"], "note": "both"}
    assert known["43"] is None
    assert (known["44"] or {})["users"] == ["joana"]
    left = await execute(store, select(tables.firings.c.recipient).order_by(tables.firings.c.recipient))
    assert [row.recipient for row in left] == ["bo", "joana"]
    assert (await change_item(store, home, 1, HOUR, key="43", users="ana")).stale == 1
    assert not [one for one in await everything(store) if one.owner_id == "ana" or one.payload == "ana"]
    assert {one.owner_id for one in await everything(store) if one.state == "pending"} == {"bo", "joana"}


@stored
async def test_a_manually_rescheduled_job_of_a_trigger_becomes_a_one_time_job(store: Store) -> None:
    from timebell.store.jobs import repository

    home, _ = await source(store), await trigger(store)
    await change_item(store, home, 1, HOUR)
    (planned,) = await everything(store)
    moved = new_id(T0)
    await store.run(
        repository.reschedule, None, planned.id, moved, lambda old: {"run_at": HOUR, "timezone": old.timezone}, T0
    )
    assert (await get(store, moved)).kind is Kind.ONCE


@stored
async def test_an_explanation_names_the_cause(store: Store) -> None:
    home, made = await source(store), await trigger(store, offsets=(Offset(), Offset.parse("-2d")))

    async def explanation(key: str) -> str:
        history = await store.run(item_history.find_item_history, made, key)
        assert history is not None
        return "\n".join(explain_item(made, history, T0))

    await change_item(store, home, 1, HOUR, key="planned")
    await change_item(store, home, 1, "soon", key="unreadable")
    await change_item(store, home, 1, None, key="empty")
    await change_item(store, home, 1, HOUR, key="gone")
    await change_item(store, home, 2, "gone", key="gone")
    planned = await explanation("planned")
    assert "is planned for 2027-03-01T13:00:00Z" in planned
    assert "Offset -2d: not fired. Its time 2027-02-27T13:00:00Z was more than a day ago" in planned
    assert "It cannot be read, so nothing is planned: start_at: 'soon'" in await explanation("unreadable")
    assert "start_at is empty" in await explanation("empty")
    assert "The item was deleted" in await explanation("gone")


@stored
async def test_an_audit_finds_missing_overdue_and_duplicate_firings(store: Store) -> None:
    home, made = await source(store), await trigger(store)
    for key in ("fired", "missing", "overdue", "twice"):
        await change_item(store, home, 1, HOUR, key=key)
    await change_item(store, home, 1, after(hours=-2), key="late")

    async def audit() -> FiringAudit:
        report = FiringAudit()
        assert await store.run(audit_page, made, after(hours=-3), after(hours=3), None, report) is None
        return report

    async def change(key: str, **values: Any) -> None:
        await execute(store, update(tables.firings).where(tables.firings.c.item == key).values(**values))

    async def remove_job(key: str) -> None:
        await execute(store, delete(jobs_table).where(jobs_table.c.key.contains(f"__{key}__")))

    for key in ("fired", "twice"):
        await remove_job(key)
    await change("missing", at=None, job_id=None)
    former = encode([["x", epoch_micros(HOUR), True]])
    await change("twice", history=former)
    report = await audit()
    assert report.expected == 5
    assert report.outcomes == {"planned": 2, "late": 1}
    assert [(each.kind, each.item, each.at) for each in report.differences] == [
        ("missing", "missing", HOUR), ("overdue", "overdue", HOUR), ("duplicate", "twice", HOUR),
    ]  # fmt: skip
