"""What every change by way of the API ends with: the audit record, and the answer that is kept."""

from __future__ import annotations

from datetime import timedelta

from timebell.ids import new_id
from timebell.store.audit import audit_log
from timebell.store.audit.audit_log import AuditRecord
from timebell.store.tenancy import idempotency
from timebell.store.tenancy.idempotency import Answer

from .helpers import T0, Store, stored


@stored
async def test_a_record_comes_back_as_it_was_written(store: Store) -> None:
    record = AuditRecord(
        id=new_id(T0), tenant_id="default", at=T0, actor="dana", action="job.create", subject="x", key_id=None,
        address="127.0.0.1", before="b", after="a", request_id=new_id(T0),
    )  # fmt: skip
    await store.run(audit_log.write, record)
    assert (await store.run(audit_log.page, "default", 10, None)).items == [record]


@stored
async def test_a_key_is_taken_once_and_its_answer_kept_for_a_while(store: Store) -> None:
    given = Answer("r", 201, {"Location": "/x"}, '{"a":1}')
    assert await store.run(idempotency.take, "default", "k", "r", T0) is None
    await store.run(idempotency.keep, "default", "k", given)
    assert await store.run(idempotency.take, "default", "k", "other", T0 + timedelta(minutes=1)) == given
    assert await store.run(idempotency.take, "default", "k", "r", T0 + idempotency.KEPT) is None
