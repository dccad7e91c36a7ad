"""A FastAPI shop: each order and its reminder are one transaction of SQLAlchemy. `test_shop.py` has its tests.

pip install "timebell[server]" "sqlalchemy[asyncio]" asyncpg
export SHOP_DATABASE_URL=postgresql+asyncpg://shop@localhost/shop
python -c "import shop; shop.bell.sync.upgrade()"
uvicorn shop:web
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from timebell import Arrived, Timebell

url = make_url(os.environ["SHOP_DATABASE_URL"])
engine = create_async_engine(url)
sessions = async_sessionmaker(engine)
bell = Timebell(url.render_as_string(hide_password=False), timezone="UTC")


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="new")


@bell.on("orders.remind")
async def remind(event: Arrived[dict[str, int]]) -> None:
    async with sessions.begin() as session:
        order = await session.get_one(Order, event.payload["order"])
        order.state = "reminded"


async def transaction() -> AsyncIterator[AsyncSession]:
    async with sessions.begin() as session:
        yield session


Transaction = Annotated[AsyncSession, Depends(transaction, scope="function")]  # it commits before the response is sent
web = FastAPI(lifespan=bell.lifespan)


@web.post("/orders")
async def create(session: Transaction, is_paid: bool = True) -> dict[str, int]:
    order = Order()
    session.add(order)
    await session.flush()
    await remind.schedule_in(timedelta(hours=1), {"order": order.id}, connection=session)
    if not is_paid:
        raise HTTPException(402)  # neither the order nor its reminder exists
    return {"order": order.id}


@web.get("/orders/{order}")
async def show(order: int, session: Transaction) -> dict[str, str]:
    return {"state": (await session.get_one(Order, order)).state}
