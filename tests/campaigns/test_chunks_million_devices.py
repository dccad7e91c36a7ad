"""A campaign over a million devices, while devices are added and removed: it ends, and reaches each device once.

tests/conformance/test_campaigns.py does the same with a hundred devices in every run. `-s` shows the progress.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from random import Random

import pytest

from benchmarks.campaign_people import COLUMNS, device_records
from timebell import Timebell
from timebell.features.campaigns.model.campaign import CampaignState
from timebell.features.campaigns.model.campaign_plan import Campaign, CampaignPlan
from timebell.features.campaigns.store import campaigns, chunk_results, chunks, definitions, devices
from timebell.features.campaigns.store.chunk_results import DeliveryResult
from timebell.features.campaigns.store.tables import devices as table
from timebell.ids import new_id
from timebell.store.transaction import Transaction

MILLION = 1_000_000


@pytest.mark.soak
def test_a_campaign_reaches_each_of_a_million_devices_once(store_url: str) -> None:
    async def walk() -> None:
        app = Timebell(store_url, timezone="UTC")
        await app.open()
        store, random, now = app.store, Random(7), app.clock.now()
        for at in range(0, MILLION, 50_000):

            def load(tx: Transaction, at: int = at) -> None:
                tx.bulk_insert(table.name, COLUMNS, device_records(tx, at, at + 50_000, now))

            await store.run(load)
        now += timedelta(seconds=1)
        created = Campaign(
            id=new_id(now), tenant_id="default", plan=CampaignPlan.from_json({"title": "Hello", "chunkDelayMs": 0}),
            state=CampaignState.PENDING, send_at=now, timezone="UTC", created_at=now, updated_at=now,
        )  # fmt: skip
        await store.run(definitions.create_campaign, created)
        reached: set[int] = set()
        gone: set[int] = set()
        while (found := await store.run(campaigns.find_campaign, None, created.id)).state != "completed":  # type: ignore[union-attr]
            assert found is not None and found.job_id is not None
            now += timedelta(milliseconds=10)
            opened = await store.run(chunks.open_chunk, created.id, found.next_chunk, found.job_id, 1, now)
            numbers = [int(each.token[1:10]) for each in opened.recipients]
            assert reached.isdisjoint(numbers) and len(set(numbers)) == len(numbers)
            reached.update(numbers)
            results = [DeliveryResult(each, "accepted") for each in opened.recipients]
            await store.run(chunk_results.close_chunk, created.id, opened.number, 1, results, 0, now)
            now += timedelta(milliseconds=10)
            lost = [random.randrange(MILLION) for _ in range(20)]
            tokens = [f"d{n:09d}:{'APA91b' * 23}" for n in lost]
            await store.run(devices.delete_by_token, "default", tokens)
            gone.update(lost)
            back = [
                (token, {}) for token in tokens[:10]
            ]  # registered again as new devices, which this campaign excludes
            new = [(f"d{MILLION + opened.number * 500 + n:09d}:{'APA91b' * 23}", {}) for n in range(500)]
            await store.run(devices.register_devices, "default", back + new, now)
            if opened.number % 200 == 0:
                print(f"{len(reached):,} of {MILLION:,}")
        await app.close()
        assert max(reached) < MILLION  # none of the devices added later
        assert set(range(MILLION)) - reached <= gone
        assert found.accepted == found.opened == len(reached)

    asyncio.run(walk())
