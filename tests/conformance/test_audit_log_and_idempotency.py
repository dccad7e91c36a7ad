"""Audit records and stored responses of changes by the API."""

from __future__ import annotations

from datetime import timedelta

from timebell.ids import new_id
from timebell.store.audit import audit_log
from timebell.store.audit.audit_log import AuditRecord
from timebell.store.tenancy import idempotency, usage
from timebell.store.tenancy.idempotency import StoredResponse

from .helpers import T0, Store, stored


@stored
async def test_an_audit_record_is_read_back_unchanged(store: Store) -> None:
    record = AuditRecord(
        id=new_id(T0), tenant_id="default", at=T0, actor="dana", actor_kind="user", action="job.create",
        subject="x", subject_name="X", outcome="refused", code="STALE", suppressed=3, key_id=None, address="127.0.0.1",
        before={"a": 1}, after={"a": [2]}, request_id=new_id(T0),
    )  # fmt: skip
    await store.run(audit_log.write_record, record)
    assert (await store.run(audit_log.list_records, "default", 10, None)).items == [record]


@stored
async def test_a_change_is_recorded_and_its_size_is_added_to_the_usage_of_the_day(store: Store) -> None:
    for number, size in enumerate((100, 20, 3)):
        record = AuditRecord(
            id=new_id(T0), tenant_id="default", at=T0, actor="dana", actor_kind="user", action="job.create",
            subject=str(number), after={"a": [2]}, request_id=new_id(T0),
        )  # fmt: skip
        await store.run(usage.record_change, record, usage.utc_day(T0), size)
        assert (await store.run(audit_log.list_records, "default", 1, None)).items == [record]
    assert (await store.run(usage.get_usage, "default", T0)).payload_bytes == 123
    assert (await store.run(usage.get_usage, "default", T0 + timedelta(days=1))).payload_bytes == 0


@stored
async def test_an_idempotency_key_is_claimed_once_and_its_response_expires(store: Store) -> None:
    given = StoredResponse("r", 201, {"Location": "/x"}, '{"a":1}')
    assert await store.run(idempotency.claim_key, "default", "k", "r", T0) is None
    await store.run(idempotency.store_response, "default", "k", given)
    assert await store.run(idempotency.claim_key, "default", "k", "other", T0 + timedelta(minutes=1)) == given
    assert await store.run(idempotency.claim_key, "default", "k", "r", T0 + idempotency.KEY_RETENTION) is None
