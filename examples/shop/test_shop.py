"""Tests of the shop, on virtual time: `python -m pytest`. They use a database file of their own."""

import os
from datetime import datetime

os.environ["TIMEBELL_DATABASE_URL"] = "sqlite:///test.db"
os.environ["TIMEBELL_SECRET_KEY"] = "00" * 32
os.environ["TIMEBELL_WEBHOOK_SIGNING_SECRET"] = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz"
os.environ["WAREHOUSE_URL"] = "https://warehouse.example.com/parcels"

import pytest
from fastapi.testclient import TestClient
from shop import web as pages
from shop.jobs import bell
from shop.tables import Base, Order, engine, sessions


@pytest.fixture
def shop(timebell):
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    timebell.freeze("2027-03-28T12:00[Europe/Berlin]")  # a Sunday
    timebell.use(bell)
    yield timebell
    engine.dispose()


@pytest.fixture
def client(shop):
    return TestClient(pages.web)


def test_an_unpaid_order_is_reminded_of_after_an_hour(shop, client):
    order = client.post("/orders", json={"customer": "ana"}).json()["order"]
    shop.advance(minutes=59)
    assert client.get(f"/orders/{order}").json()["state"] == "new"
    runs = shop.advance(minutes=1)
    assert runs.of("orders.remind").outcomes == ["completed"]
    assert client.get(f"/orders/{order}").json()["state"] == "reminded"


def test_a_paid_order_is_packed_and_not_reminded_of(shop, client):
    order = client.post("/orders", json={"customer": "ana"}).json()["order"]
    answer = client.post(f"/orders/{order}/pay").json()
    assert answer["reminder"] == "prevented"
    shop.assert_scheduled("parcels.pack", {"order": order}, key=f"parcel-{order}")
    shop.advance(hours=2)
    assert client.get(f"/orders/{order}").json()["state"] == "paid"
    assert client.post(f"/orders/{order}/pay").status_code == 409


def test_a_failed_order_leaves_no_reminder(shop, client, monkeypatch):
    def fail(session, order_id):
        raise RuntimeError("the card was declined")

    monkeypatch.setattr(pages, "find_order", fail)
    order = client.post("/orders", json={"customer": "ana"}).json()["order"]
    with pytest.raises(RuntimeError):
        client.post(f"/orders/{order}/pay")
    shop.assert_not_scheduled("parcels.pack")
    shop.assert_scheduled("orders.remind", {"order": order})


def test_the_report_runs_at_seven_in_berlin_on_weekdays(shop, client):
    client.post("/orders", json={"customer": "ana"})
    assert shop.jump_to("2027-03-29T06:59[Europe/Berlin]").of("daily-report") == []  # a weekend
    (run,) = shop.advance(minutes=1).of("daily-report")
    assert f"{run.scheduled_at:%a %H:%M}" == "Mon 05:00"  # UTC+2: the clocks changed on Sunday
    assert run.error is None
    assert shop.run(bell.get(run.job_id)).result == {"reminded": 1}


def test_a_delivery_is_announced_15_minutes_ahead_and_follows_the_order(shop, client):
    order = client.post("/orders", json={"customer": "ana", "deliver_at": "2027-03-28T14:00"}).json()["order"]
    client.post(f"/orders/{order}/pay")
    shop.advance(minutes=1)
    with sessions.begin() as session:  # another program moves the delivery
        session.get_one(Order, order).deliver_at = datetime.fromisoformat("2027-03-28T16:00")
    old = shop.jump_to("2027-03-28T15:44[Europe/Berlin]").of("deliveries.announce")
    assert old.outcomes == ["cancelled (withdrawn)"]
    (run,) = shop.advance(minutes=2).of("deliveries.announce")
    assert (run.state, run.payload["recipient"]) == ("completed", "ana")
    assert f"{run.scheduled_at:%H:%M}" == "13:45"  # 15:45 in Berlin


def test_a_sale_is_for_the_phones_whose_owners_agreed(shop, client):
    for customer, marketing in (("ana", True), ("bo", False)):
        phone = {"token": f"phone-of-{customer}", "customer": customer, "marketing": marketing}
        assert client.put("/phones", json=phone).status_code == 204
    sale = {"title": "Spring sale", "body": "Cups are cheap", "at": "2027-03-29T09:00"}
    campaign = client.post("/sales", json=sale).json()["campaign"]
    found = shop.run(bell.campaigns.get(campaign))
    assert f"{found.send_at:%F %H:%M}" == "2027-03-29 07:00"
    assert shop.run(bell.devices.count({"marketingOnOff": True})) == 1
