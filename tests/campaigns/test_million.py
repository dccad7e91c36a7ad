"""The walk of a campaign over a million devices, while others come and go: it ends, repeats nobody, misses nobody.

The same at a hundred devices, at every run, is in tests/conformance/test_campaigns.py. `-s` shows how far it is.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from random import Random

import pytest

from benchmarks.campaigns import COLUMNS, _records
from timebell import Timebell
from timebell.ids import new_id
from timebell.model.campaign import CampaignState
from timebell.model.campaign_plan import Campaign, Sending
from timebell.store.campaigns import campaigns, chunks, devices
from timebell.store.campaigns.chunks import Told
from timebell.store.campaigns.tables import devices as table
from timebell.store.transaction import Transaction

MILLION = 1_000_000


@pytest.mark.slow
def test_a_walk_over_a_million_ends_and_repeats_and_misses_nobody(store_url: str) -> None:
    async def walk() -> None:
        app = Timebell(store_url, timezone="UTC")
        await app.open()
        store, random, now = app.store, Random(7), app.clock.now()
        for at in range(0, MILLION, 50_000):

            def load(tx: Transaction, at: int = at) -> None:
                tx.load(table.name, COLUMNS, _records(tx, at, at + 50_000, now))

            await store.run(load)
        now += timedelta(seconds=1)
        made = Campaign(
            id=new_id(now), tenant_id="default", sending=Sending.read({"title": "Hello", "chunkDelayMs": 0}),
            state=CampaignState.PENDING, send_at=now, timezone="UTC", created_at=now, updated_at=now,
        )  # fmt: skip
        await store.run(campaigns.create, made, now)
        reached: set[int] = set()
        gone: set[int] = set()
        while (found := await store.run(campaigns.find, None, made.id)).state != "completed":  # type: ignore[union-attr]
            assert found is not None and found.job_id is not None
            now += timedelta(milliseconds=10)
            opened = await store.run(chunks.open_chunk, made.id, found.next_chunk, found.job_id, 1, now)
            numbers = [int(each.token[1:10]) for each in opened.recipients]
            assert reached.isdisjoint(numbers) and len(set(numbers)) == len(numbers)
            reached.update(numbers)
            told = [Told(each, "accepted") for each in opened.recipients]
            await store.run(chunks.close_chunk, made.id, opened.number, 1, told, 0, now)
            now += timedelta(milliseconds=10)
            lost = [random.randrange(MILLION) for _ in range(20)]
            tokens = [f"d{n:09d}:{'APA91b' * 23}" for n in lost]
            await store.run(devices.remove, "default", tokens)
            gone.update(lost)
            back = [(token, {}) for token in tokens[:10]]  # as somebody new, who may get it no more
            new = [(f"d{MILLION + opened.number * 500 + n:09d}:{'APA91b' * 23}", {}) for n in range(500)]
            await store.run(devices.register, "default", back + new, now)
            if opened.number % 200 == 0:
                print(f"{len(reached):,} of {MILLION:,}")
        await app.close()
        assert max(reached) < MILLION  # of those who came later, none
        assert set(range(MILLION)) - reached <= gone
        assert found.accepted == found.opened == len(reached)

    asyncio.run(walk())
