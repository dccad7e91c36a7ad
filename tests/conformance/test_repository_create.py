"""Creating jobs: batches are atomic, values are stored exactly, and keys and request ids are unique."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import func, select

from timebell.errors import Conflict, InvalidInput
from timebell.ids import new_id
from timebell.model.job import Kind, NewJob
from timebell.model.payload import MAX_PAYLOAD_BYTES, decode, encode
from timebell.store.audit import audit_log
from timebell.store.audit.audit_log import AuditRecord
from timebell.store.jobs import complete, repository, retention
from timebell.store.jobs.recorded_creation import create_recorded
from timebell.store.open import open_store
from timebell.store.schema import requests, tenants
from timebell.store.tenancy import usage

from .helpers import (
    T0,
    JobState,
    Store,
    after,
    again,
    claim,
    create,
    end,
    ending,
    everything,
    execute,
    get,
    job,
    one,
    started,
    stored,
)


@stored
async def test_a_created_job_is_read_back_unchanged(store: Store) -> None:
    new = job(
        run_at=after(hours=1, microseconds=123_457), timezone="America/Argentina/ComodRivadavia",
        payload=encode({"b": [1, 2.5, None, True], "a": "x"}), metadata=encode({"correlation_id": "c-1"}),
        owner_id="u-1", key="k", queue="mail", priority=-7, retry=encode({"attempts": 2}), timeout=2.5,
        expires_at=after(hours=2), target=encode({"kind": "http", "options": {}}), topic="a.b", tenant_id="acme",
        created_at=after(microseconds=1),
    )  # fmt: skip
    await create(store, new)
    seen = await get(store, new.id)
    assert seen.run_at == seen.scheduled_at == after(hours=1, microseconds=123_457)
    assert (seen.tenant_id, seen.topic, seen.timezone) == ("acme", "a.b", "America/Argentina/ComodRivadavia")
    assert list(seen.payload.items()) == [("b", [1, 2.5, None, True]), ("a", "x")]
    assert (seen.metadata, seen.correlation_id, seen.owner_id) == ({"correlation_id": "c-1"}, "c-1", "u-1")
    assert (seen.key, seen.queue, seen.priority, seen.timeout) == ("k", "mail", -7, 2.5)
    assert (seen.retry, seen.target) == ({"attempts": 2}, {"kind": "http", "options": {}})
    assert (seen.expires_at, seen.created_at) == (after(hours=2), after(microseconds=1))
    assert (seen.state, seen.attempt, seen.attempts_used, seen.kind) == (JobState.PENDING, 0, 0, Kind.ONCE)
    assert (seen.started_at, seen.finished_at, seen.hold, seen.attempts, seen.replaces) == (None, None, None, [], None)


@stored
async def test_none_and_zero_are_distinguished(store: Store) -> None:
    bare = await get(store, await one(store))
    assert (bare.payload, bare.owner_id, bare.key, bare.timeout, bare.expires_at) == (None, None, None, None, None)
    assert (bare.target, bare.retry, bare.metadata, bare.correlation_id) == (None, None, {}, None)
    for value in (0, 0.0, "", [], {}, False):
        assert (await get(store, await one(store, payload=encode(value)))).payload == value
    assert (await get(store, await one(store, timeout=0.0))).timeout == 0.0


@pytest.mark.parametrize("bulk", [False, True], ids=["one by one", "bulk"])
@pytest.mark.parametrize(
    "text",
    [
        "약 먹기 💊 — “ça va?” مرحبا עברית \u200b\u2028",
        'it\'s "quoted" \\ \\n $1 :rows %s {0} ${x} -- /* */ ; DROP TABLE timebell_jobs',
        "\t\r\n\x01\x7f\ufeff\U0010ffff",
        "cafe\u0301 vs caf\u00e9",
    ],
)
@stored
async def test_text_is_read_back_exactly(store: Store, text: str, bulk: bool) -> None:
    new = job(payload=encode({text: [text]}), owner_id=text, queue=text, metadata=encode({"m": text}))
    await create(store, new, bulk=bulk)
    seen = await get(store, new.id)
    assert (seen.payload, seen.owner_id, seen.queue, seen.metadata) == ({text: [text]}, text, text, {"m": text})


@pytest.mark.parametrize("bulk", [False, True], ids=["one by one", "bulk"])
@stored
async def test_numbers_are_read_back_exactly(store: Store, bulk: bool) -> None:
    numbers = [2**64 - 1, -(2**63), 2**53 + 1, 0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0]
    new = job(payload=encode(numbers))
    await create(store, new, bulk=bulk)
    assert list(map(repr, (await get(store, new.id)).payload)) == list(map(repr, numbers))


@pytest.mark.parametrize("bulk", [False, True], ids=["one by one", "bulk"])
@stored
async def test_a_payload_of_64_kib_is_stored_and_reaches_the_attempt(store: Store, bulk: bool) -> None:
    payload = encode("é" * ((MAX_PAYLOAD_BYTES - 2) // 2))
    assert len(payload.encode()) == MAX_PAYLOAD_BYTES
    new = job(payload=payload)
    await create(store, new, bulk=bulk)
    assert len((await get(store, new.id)).payload) == (MAX_PAYLOAD_BYTES - 2) // 2
    (attempt,) = await claim(store)
    assert attempt.payload == payload


@stored
async def test_bulk_and_single_inserts_write_the_same_rows(store: Store) -> None:
    fields = {"payload": encode([1]), "owner_id": "o", "priority": 3, "timeout": 0.5, "expires_at": after(days=1)}
    singly, in_bulk = job(**fields), job(**fields)
    await create(store, singly)
    await create(store, in_bulk, bulk=True)
    a, b = await get(store, singly.id), await get(store, in_bulk.id)
    assert {name for name in a.__slots__ if getattr(a, name) != getattr(b, name)} == {"id"}


@stored
async def test_a_tenant_is_created_once_on_first_use(store: Store) -> None:
    await create(store, job(tenant_id="acme"), job(tenant_id="bolt", created_at=after(hours=1)), job(tenant_id="acme"))
    await create(store, job(tenant_id="acme"))
    made = await execute(store, select(tenants.c.id).where(tenants.c.id != "default").order_by(tenants.c.id))
    assert [row.id for row in made] == ["acme", "bolt"]


@stored
async def test_a_refused_batch_leaves_nothing_behind(store: Store) -> None:
    await one(store, key="taken")
    with pytest.raises(Conflict):
        await create(
            store, job(tenant_id="newcomer", request_id="r"), job(key="fresh"), job(key="taken"), on_conflict="error"
        )
    assert len(await everything(store)) == 1
    assert (await execute(store, select(func.count()).select_from(requests)))[0][0] == 0
    assert not await execute(store, select(tenants.c.id).where(tenants.c.id == "newcomer"))


# Keys: unique among live jobs of a tenant.


@stored
async def test_a_key_of_a_live_job_is_refused_with_the_id_of_that_job(store: Store) -> None:
    first = await one(store, key="k")
    with pytest.raises(Conflict) as refused:
        await create(store, job(key="k"))
    assert (refused.value.code, refused.value.existing) == ("KEY_IN_USE", first)
    await claim(store)
    with pytest.raises(Conflict):
        await create(store, job(key="k"))


@stored
async def test_a_key_is_free_again_once_its_job_is_finished(store: Store) -> None:
    attempt = await started(store, key="k")
    await end(store, ending(attempt))
    assert await create(store, job(key="k")) == {}


@stored
async def test_keys_are_per_tenant_and_case_sensitive(store: Store) -> None:
    await one(store, key="k", tenant_id="a")
    await one(store, key="k", tenant_id="b")
    await one(store, key="K", tenant_id="a")
    await one(store, key="k ", tenant_id="a")


@stored
async def test_keep_returns_the_existing_job(store: Store) -> None:
    first = await one(store, key="k", payload="1")
    second = job(key="k", payload="2")
    assert await create(store, second, on_conflict="keep") == {second.id: first}
    assert [seen.payload for seen in await everything(store)] == [1]


@stored
async def test_keep_returns_a_running_job(store: Store) -> None:
    attempt = await started(store, key="k")
    new = job(key="k")
    assert await create(store, new, on_conflict="keep") == {new.id: attempt.id}


@stored
async def test_keep_writes_the_other_jobs_of_a_batch(store: Store) -> None:
    first = await one(store, key="k")
    again_, fresh = job(key="k"), job(key="other")
    assert await create(store, again_, fresh, on_conflict="keep") == {again_.id: first}
    assert {seen.id for seen in await everything(store)} == {first, fresh.id}


@stored
async def test_keep_within_a_batch_keeps_the_first_job(store: Store) -> None:
    first, second = job(key="k"), job(key="k")
    assert await create(store, first, second, on_conflict="keep") == {second.id: first.id}


@stored
async def test_replace_cancels_the_pending_one_and_links_both(store: Store) -> None:
    old = await one(store, key="k", payload="1")
    new = job(key="k", payload="2")
    assert await create(store, new, on_conflict="replace") == {}
    was, is_ = await get(store, old), await get(store, new.id)
    assert (was.state, was.replaced_by, is_.state, is_.replaces) == (JobState.CANCELLED, new.id, JobState.PENDING, old)
    assert [attempt.id for attempt in await claim(store)] == [new.id]
    answer = await store.run(repository.cancel, None, old, T0)
    assert answer is not None and answer.outcome == "prevented"


@stored
async def test_replace_of_a_job_waiting_for_retry_succeeds(store: Store) -> None:
    attempt = await started(store, key="k")
    assert await store.run_autocommit(complete.schedule_retries, [again(attempt, after(minutes=5))])
    await create(store, job(key="k"), on_conflict="replace")
    assert (await get(store, attempt.id)).state is JobState.CANCELLED


@stored
async def test_replace_of_a_running_one_is_a_conflict_and_changes_nothing(store: Store) -> None:
    attempt = await started(store, key="k")
    with pytest.raises(Conflict) as refused:
        await create(store, job(key="k"), on_conflict="replace")
    assert (refused.value.code, refused.value.existing) == ("KEY_IN_USE", attempt.id)
    assert [seen.id for seen in await everything(store)] == [attempt.id]
    assert await end(store, ending(attempt))


@stored
async def test_replace_without_an_existing_job_creates_one(store: Store) -> None:
    assert await create(store, job(key="k"), on_conflict="replace") == {}


# Request ids: unique per tenant forever, in all states.


@stored
async def test_a_repeated_request_id_is_refused_forever_with_the_id_of_its_job(store: Store) -> None:
    attempt = await started(store, request_id="r")
    await end(store, ending(attempt))
    with pytest.raises(Conflict) as refused:
        await create(store, job(request_id="r"))
    assert refused.value.code == "SCHEDULE_CLIENT_REQUEST_ID_IN_USE"
    assert refused.value.existing == attempt.id


@stored
async def test_a_request_id_outlives_retention_of_its_job(store: Store) -> None:
    attempt = await started(store, request_id="r")
    await end(store, ending(attempt))
    await store.run(retention.prune, after(days=1), 10)
    new = job(request_id="r")
    assert await create(store, new, on_conflict="keep") == {new.id: attempt.id}
    assert await everything(store) == []


@stored
async def test_a_repeated_request_can_return_its_job(store: Store) -> None:
    first = await one(store, request_id="r")
    new = job(request_id="r")
    assert await create(store, new, on_conflict="keep") == {new.id: first}


@stored
async def test_jobs_of_one_batch_with_the_same_request_id_are_one_job(store: Store) -> None:
    first = job(request_id="r")
    same, other = [job(request_id="r") for _ in range(3)], job(request_id="s")
    kept = await create(store, first, *same, other, on_conflict="keep")
    assert kept == {one.id: first.id for one in same}
    again = [job(request_id="r"), job(request_id="r"), job(request_id="s")]
    kept = await create(store, *again, on_conflict="keep")
    assert kept == dict(zip([one.id for one in again], [first.id, first.id, other.id], strict=True))


@stored
async def test_a_batch_keeps_existing_jobs_and_creates_the_others(store: Store) -> None:
    known, holder = await one(store, request_id="r"), await one(store, key="k")
    repeated, held, requested, plain = job(request_id="r"), job(key="k", request_id="s"), job(request_id="t"), job()
    kept = await create(store, repeated, held, requested, plain, on_conflict="keep")
    assert kept == {repeated.id: known, held.id: holder}
    assert [seen.id for seen in await everything(store)] == [known, holder, requested.id, plain.id]


@stored
async def test_a_batch_with_a_used_request_id_is_refused_as_a_whole(store: Store) -> None:
    known = await one(store, request_id="r")
    with pytest.raises(Conflict) as refused:
        await create(store, job(request_id="s"), job(), job(request_id="r"))
    assert (refused.value.code, refused.value.existing) == ("SCHEDULE_CLIENT_REQUEST_ID_IN_USE", known)
    assert [seen.id for seen in await everything(store)] == [known]
    await one(store, request_id="s")


@stored
async def test_a_request_id_that_kept_another_job_leads_to_that_job(store: Store) -> None:
    standing = await one(store, key="k")
    first, second = job(key="k", request_id="r"), job(key="k", request_id="r")
    assert await create(store, first, on_conflict="keep") == {first.id: standing}
    assert await create(store, second, on_conflict="keep") == {second.id: standing}


@stored
async def test_replace_does_not_reuse_a_request_id(store: Store) -> None:
    known, other = await one(store, key="k", request_id="r"), await one(store, key="l")
    with pytest.raises(Conflict) as refused:
        await create(store, job(key="l", request_id="s"), job(key="k", request_id="r"), on_conflict="replace")
    assert (refused.value.code, refused.value.existing) == ("SCHEDULE_CLIENT_REQUEST_ID_IN_USE", known)
    assert [(seen.id, seen.state) for seen in await everything(store)] == [(known, "pending"), (other, "pending")]


@stored
async def test_request_ids_are_per_tenant(store: Store) -> None:
    await one(store, request_id="r", tenant_id="a")
    await one(store, request_id="r", tenant_id="b")


@stored
async def test_a_duplicate_request_id_in_one_batch_is_refused_or_kept(store: Store) -> None:
    first, second = job(request_id="r"), job(request_id="r")
    with pytest.raises(Conflict):
        await create(store, first, second)
    assert await everything(store) == []
    assert await create(store, first, second, on_conflict="keep") == {second.id: first.id}


@stored
async def test_simultaneous_identical_requests_create_one_job(store: Store) -> None:
    news = [job(tenant_id="brand-new", request_id="r") for _ in range(8)]
    answers = await asyncio.gather(*(create(store, new, on_conflict="keep") for new in news))
    (made,) = await everything(store)
    assert all(
        answer == ({} if new.id == made.id else {new.id: made.id}) for new, answer in zip(news, answers, strict=True)
    )


@stored
async def test_simultaneous_jobs_with_one_key_create_one_job(store: Store) -> None:
    news = [job(tenant_id="brand-new", key="k") for _ in range(8)]
    answers = await asyncio.gather(*(create(store, new) for new in news), return_exceptions=True)
    (made,) = await everything(store)
    refused = [answer for answer in answers if answer != {}]
    assert len(refused) == 7
    assert all(isinstance(answer, Conflict) and answer.existing == made.id for answer in refused)


@stored
async def test_simultaneous_replacements_of_a_key_leave_one_live_job(store: Store) -> None:
    await one(store, key="k")
    news = [job(key="k") for _ in range(8)]
    answers = await asyncio.gather(*(create(store, new, on_conflict="replace") for new in news), return_exceptions=True)
    assert all(answer == {} or isinstance(answer, Conflict) for answer in answers), answers
    assert [seen.state for seen in await everything(store)].count(JobState.PENDING) == 1


@stored
async def test_two_clients_can_create_the_first_jobs_simultaneously(store: Store) -> None:
    other = open_store(store.url, lambda: T0, server_clock=False)
    await other.open()
    try:
        await asyncio.gather(*(create(one, job(tenant_id=f"t{n}")) for n in range(5) for one in (store, other)))
    finally:
        await other.close()
    assert len(await everything(store)) == 10


def _record(subject: str) -> AuditRecord:
    return AuditRecord(
        id=new_id(T0), tenant_id="default", at=T0, actor="dana", actor_kind="user", action="job.create",
        subject=subject, after={"topic": "t"}, request_id=new_id(T0),
    )  # fmt: skip


async def _create_recorded(store: Store, new: NewJob, record: AuditRecord) -> bool:
    async with store.begin() as connection:
        return await store.join(connection, create_recorded, new, record, usage.utc_day(T0), 100)


async def _list_records(store: Store) -> list[AuditRecord]:
    return (await store.run(audit_log.list_records, "default", 10, None)).items


@stored
async def test_a_job_is_created_with_its_audit_record_and_the_usage_of_its_tenant(store: Store) -> None:
    new = [job(request_id="r", run_at=after(hours=1), payload='{"a":1}', group="g"), job()]
    records = [_record(each.id) for each in new]
    for each, record in zip(new, records, strict=True):
        assert await _create_recorded(store, each, record)
        seen = await get(store, each.id)
        assert (seen.run_at, seen.payload, seen.group) == (each.run_at, decode(each.payload), each.group)
    assert await _list_records(store) == records[::-1]
    assert (await store.run(usage.get_usage, "default", T0)).payload_bytes == 200
    assert await store.run(repository.find_by_request_id, "default", "r", "keep") == new[0].id


@stored
async def test_neither_job_nor_record_is_created_for_a_used_request_id_or_an_unknown_tenant(store: Store) -> None:
    first = job(request_id="r")
    await create(store, first)
    for refused in (job(request_id="r"), job(request_id="other", tenant_id="unknown")):
        assert not await _create_recorded(store, refused, _record(refused.id))
    assert [each.id for each in await everything(store)] == [first.id]
    assert await _list_records(store) == []
    assert (await store.run(usage.get_usage, "default", T0)).payload_bytes == 0
    assert await store.run(repository.find_by_request_id, "unknown", "other", "keep") is None


@stored
async def test_a_recorded_creation_is_rolled_back_with_its_transaction(store: Store) -> None:
    async def fail_after_two_creations() -> None:
        async with store.begin() as connection:
            await store.join(connection, repository.create, [job()], "error")
            second = job()
            assert await store.join(connection, create_recorded, second, _record(second.id), usage.utc_day(T0), 100)
            raise InvalidInput("The request is refused.")

    with pytest.raises(InvalidInput):
        await fail_after_two_creations()
    assert await everything(store) == []
    assert await _list_records(store) == []
