"""The web server: `uvicorn shop.web:web`. It creates and cancels jobs, and runs none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel
from sqlalchemy.orm import Session

from .jobs import bell, pack, remind, start_sale
from .tables import Base, Order, engine, sessions


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Create missing tables. An application in production does that in its migrations."""
    await run_in_threadpool(bell.sync.upgrade)
    await run_in_threadpool(Base.metadata.create_all, engine)
    yield
    await run_in_threadpool(bell.sync.close)


web = FastAPI(lifespan=lifespan)


def transaction() -> Iterator[Session]:
    """A transaction that is committed before the response is sent."""
    with sessions.begin() as session:
        yield session


Transaction = Annotated[Session, Depends(transaction, scope="function")]


class NewOrder(BaseModel):
    customer: str
    deliver_at: datetime | None = None


class Phone(BaseModel):
    token: str
    customer: str
    marketing: bool = False


class Sale(BaseModel):
    title: str
    body: str
    at: datetime | None = None


@web.post("/orders", status_code=201)
def create_order(new: NewOrder, session: Transaction) -> dict[str, Any]:
    """Create an order and its reminder: both exist, or neither."""
    order = Order(customer=new.customer, deliver_at=new.deliver_at)
    session.add(order)
    session.flush()
    job = remind.sync.schedule_in(timedelta(hours=1), {"order": order.id}, owner_id=order.customer, connection=session)
    order.reminder = job.id
    return {"order": order.id, "reminder": job.id}


@web.get("/orders/{order_id}")
def show_order(order_id: int, session: Transaction) -> dict[str, Any]:
    order = find_order(session, order_id)
    return {"order": order.id, "customer": order.customer, "state": order.state}


@web.post("/orders/{order_id}/pay")
def pay(order_id: int, session: Transaction) -> dict[str, Any]:
    """Record the payment, cancel the reminder and request the parcel, in one transaction."""
    order = find_order(session, order_id)
    if order.state == "paid":
        raise HTTPException(409, "already paid")
    order.state = "paid"
    assert order.reminder is not None
    cancelled = bell.sync.cancel(order.reminder, connection=session)
    return {"reminder": cancelled.outcome, "parcel": pack(session, order)}


@web.put("/phones", status_code=204)
def register_phone(phone: Phone) -> None:
    bell.sync.devices.register(phone.token, user_id=phone.customer, push_on=True, marketing_on=phone.marketing)


@web.post("/sales", status_code=201)
def create_sale(sale: Sale) -> dict[str, str]:
    return {"campaign": start_sale(sale.title, sale.body, sale.at)}


def find_order(session: Session, order_id: int) -> Order:
    order = session.get(Order, order_id)
    if order is None:
        raise HTTPException(404, "no such order")
    return order
