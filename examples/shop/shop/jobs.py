"""Everything that the shop does at a time: `timebell dev shop.jobs:bell` runs it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from timebell import Arrived, Retry, Timebell

from .tables import DATABASE_URL, Order, sessions

ZONE = "Europe/Berlin"
WAREHOUSE_URL = os.environ.get("WAREHOUSE_URL", "http://127.0.0.1:8001/parcels")

bell = Timebell(DATABASE_URL, timezone=ZONE)


@bell.on("orders.remind", retry=Retry(attempts=5, delay=60))
def remind(event: Arrived[dict[str, int]]) -> str:
    """Remind a customer to pay. The job is cancelled when the order is paid."""
    with sessions.begin() as session:
        order = session.get_one(Order, event.payload["order"])
        if order.state != "new":
            return "not needed"
        order.state = "reminded"
        return f"reminded {order.customer}"


@bell.schedule("daily-report", cron="0 7 * * 1-5", timezone=ZONE)
def report(event: Arrived) -> dict[str, int]:
    """Count the orders in each state. The result is stored with the job."""
    with sessions() as session:
        counted = session.execute(select(Order.state, func.count()).group_by(Order.state))
        return dict(counted.all())


def pack(session: Session, order: Order) -> str:
    """Request a parcel from the warehouse, in the transaction of the session; return the id of the job.

    The job is a signed webhook. While the warehouse is down, it is retried for about an hour.
    """
    job = bell.sync.schedule_at(
        "parcels.pack", payload={"order": order.id, "customer": order.customer}, key=f"parcel-{order.id}",
        target={"kind": "http", "url": WAREHOUSE_URL}, retry=Retry(attempts=10, delay=10), connection=session,
    )  # fmt: skip
    return job.id


@bell.lifespan
async def watch_deliveries() -> AsyncIterator[None]:
    """Announce each delivery 15 minutes ahead: Timebell watches the column, so any program may write it."""
    await bell.secrets.put("shop-database", DATABASE_URL)
    await bell.triggers.put_source(
        "deliveries", "sql",
        {"url": {"secret": "shop-database"}, "changes": "compare", "everySeconds": 30,
         "query": "SELECT id, customer, deliver_at FROM orders WHERE state = 'paid' AND deliver_at IS NOT NULL"},
    )  # fmt: skip
    await bell.triggers.put(
        "delivery", "deliveries", "deliver_at", "deliveries.announce", offsets=["-15m"], timezone=ZONE,
        recipients="customer",
    )  # fmt: skip
    yield


@bell.on("deliveries.announce")
def announce(event: Arrived) -> str:
    """Tell a customer that the parcel comes in 15 minutes."""
    return f"announced order {event.payload['itemId']} to {event.payload['recipient']}"


def start_sale(title: str, body: str, at: datetime | None) -> str:
    """Send a push message to all phones whose owners agreed, now or at a local time; return the campaign's id."""
    message = {"title": title, "body": body, "marketing": True, "filters": {"marketingOnOff": True}}
    return bell.sync.campaigns.create(message, send_at=at, timezone=ZONE, name=title).id
