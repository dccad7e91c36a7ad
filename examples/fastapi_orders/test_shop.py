"""Tests of the shop on a real database of its own, with the engine on virtual time: `python -m pytest`."""

import httpx2
import pytest
from shop import Base, bell, engine, web


async def create_tables():
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.drop_all)
        await connection.run_sync(Base.metadata.create_all)


@pytest.fixture
def shop(timebell):
    timebell.use(bell)
    timebell.run(create_tables())
    yield timebell
    timebell.run(engine.dispose())


def connect():
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(web), base_url="http://shop")


async def test_an_order_is_reminded_of_after_an_hour(shop):
    async with connect() as client:
        order = (await client.post("/orders")).json()["order"]
        shop.assert_scheduled("orders.remind", {"order": order}, at="2027-01-01T01:00Z")
        await shop.aio.advance(minutes=59)
        assert (await client.get(f"/orders/{order}")).json() == {"state": "new"}
        await shop.aio.advance(minutes=1)
        assert (await client.get(f"/orders/{order}")).json() == {"state": "reminded"}


async def test_an_order_without_payment_leaves_no_reminder(shop):
    async with connect() as client:
        assert (await client.post("/orders", params={"is_paid": False})).status_code == 402
    shop.assert_not_scheduled("orders.remind")
