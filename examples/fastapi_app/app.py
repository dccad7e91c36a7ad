"""A FastAPI application that embeds Timebell: the engine in its event loop, API and dashboard under /bell.

    pip install "timebell[server]" gunicorn
    export TIMEBELL_DATABASE_URL=postgresql://timebell@localhost/reminders TIMEBELL_SECRET_KEY=...
    timebell db upgrade
    timebell user create ana --role admin               # signs in at /bell/ui/
    gunicorn --workers 4 --preload --worker-class asgi app:web    # or: uvicorn app:web --workers 4

Every worker process is a node; each occurrence fires once, whatever their number. SQLite supports only one process.
"""

from __future__ import annotations

import os

from fastapi import FastAPI

from timebell import Arrived, Timebell
from timebell.integrations.asgi import asgi_app

bell = Timebell(timezone="UTC")


@bell.schedule("heartbeat", every="PT1S", catch_up="all", overlap="allow")
async def heartbeat(event: Arrived) -> None:
    print(f"heartbeat {event.scheduled_at.isoformat()} in {os.getpid()}, attempt {event.attempt}", flush=True)


@bell.on("orders.remind")
async def remind(event: Arrived) -> str:
    print(f"order {event.payload['order']}, attempt {event.attempt}", flush=True)
    return "reminded"


web = FastAPI(lifespan=bell.lifespan)  # the engine starts and drains with the application
web.mount("/bell", asgi_app(bell))  # /bell/ui/ and /bell/api/v1


@web.post("/orders/{order}")
async def order(order: int) -> dict[str, str]:
    job = await bell.schedule_at("orders.remind", payload={"order": order}, client_request_id=f"order-{order}")
    return {"job": job.id}
