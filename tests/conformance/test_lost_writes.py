"""Which writes of a process a database has lost, on each store."""

from __future__ import annotations

import asyncio

from timebell import Every, Timebell
from timebell.store.cluster.rewinds import find_lost
from timebell.store.recent_writes import SCHEDULES, Batch


def test_a_schedule_that_another_process_deleted_is_not_lost(store_url: str) -> None:
    async def body() -> None:
        app, other = Timebell(store_url, timezone="UTC"), Timebell(store_url, timezone="UTC")
        try:
            deleted = await app.schedule_repeat("a", Every("PT1H"), name="deleted")
            kept = await app.schedule_repeat("a", Every("PT1H"), name="kept")
            await other.schedules.delete(deleted.id)
            written = app.store.recent_writes.snapshot()
            never_stored = "00000000-0000-0000-0000-000000000001"
            written.append(Batch(SCHEDULES, 0.0, {never_stored: kept.updated_at}))
            lost = await app.store.run(find_lost, written)
            assert lost[SCHEDULES] == {never_stored}
        finally:
            await other.close()
            await app.close()

    asyncio.run(body())
