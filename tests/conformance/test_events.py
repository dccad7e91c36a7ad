"""The event stream of a tenant, page by page."""

from __future__ import annotations

from timebell.ids import new_id
from timebell.store.audit import audit_log, events
from timebell.store.audit.audit_log import AuditRecord
from timebell.store.audit.events import EventFilter, EventPosition

from .helpers import T0, Store, end, ending, started, stored

BEFORE_ALL = "00000000-0000-0000-0000-000000000000"


@stored
async def test_events_of_one_instant_are_listed_page_by_page(store: Store) -> None:
    expected = []
    for _ in range(3):
        attempt = await started(store)
        await end(store, ending(attempt))
        record = AuditRecord(
            id=new_id(T0), tenant_id="default", at=T0, actor="dana", actor_kind="user", action="schedule.update"
        )
        await store.run(audit_log.write_record, record)
        expected += [attempt.id, record.id]
    listed: list[str] = []
    position: EventPosition = T0, BEFORE_ALL
    while page := await store.run(events.list_events_after, EventFilter("default"), position, 2):
        listed += [event.id for event in page]
        position = page[-1].at, page[-1].id
    assert listed == sorted(expected)
