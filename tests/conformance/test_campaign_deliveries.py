"""Pages of a campaign's recipients."""

from __future__ import annotations

import asyncio

from sqlalchemy import insert, text

from timebell.features import FEATURES
from timebell.features.campaigns.store.recipients import list_deliveries
from timebell.features.campaigns.store.tables import deliveries, devices
from timebell.ids import new_id, new_ids
from timebell.store.open import open_store, upgrade
from timebell.store.transaction import Transaction

from .helpers import T0

RECIPIENTS, PAGE = 20_000, 100
_DEVICES_READ = text(
    "SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = 'timebell_devices'"
)


def test_each_page_on_postgresql_reads_only_its_own_devices(postgres_url: str) -> None:
    campaign_id, device_ids = new_id(T0), new_ids(T0, RECIPIENTS)

    def fill(tx: Transaction) -> None:
        tx.execute(insert(devices), [
            {"id": id_, "tenant_id": "default", "token": f"token {id_}", "token_hash": f"{n:028}",
             "user_id": f"user {n}", "created_at": T0, "updated_at": T0}
            for n, id_ in enumerate(device_ids)
        ])  # fmt: skip
        tx.execute(insert(deliveries), [
            {"campaign_id": campaign_id, "recipient": id_, "chunk": 0, "state": "accepted"} for id_ in device_ids
        ])  # fmt: skip
        tx.execute(text("ANALYZE timebell_campaign_deliveries"))  # and no statistics of the devices

    def read_page(tx: Transaction, after: str) -> tuple[list[str | None], int]:
        before = tx.execute(_DEVICES_READ).scalar_one()
        page = list_deliveries(tx, campaign_id, PAGE, after, None)
        return [row["user_id"] for row in page], tx.execute(_DEVICES_READ).scalar_one() - before

    async def check() -> None:
        store = open_store(postgres_url, lambda: T0, server_clock=False)
        await store.open()
        await store.run(fill)
        for _ in range(10):  # after five executions the server may use one plan for all values
            users, read = await store.run(read_page, device_ids[RECIPIENTS // 2])
            assert users == [f"user {n}" for n in range(RECIPIENTS // 2 + 1, RECIPIENTS // 2 + 1 + PAGE)]
            assert read <= PAGE + 1
        await store.close()

    asyncio.run(upgrade(postgres_url, FEATURES))
    asyncio.run(check())
