"""Another company's service, which receives the webhooks: `uvicorn shop.warehouse:web --port 8001`."""

from __future__ import annotations

import os

from fastapi import FastAPI, HTTPException, Request
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

web = FastAPI()
packed: dict[str, int] = {}
"""Orders by message id. A message that comes again is the same parcel."""


@web.post("/parcels")
async def pack(request: Request) -> dict[str, int]:
    try:
        secret = os.environ["TIMEBELL_WEBHOOK_SIGNING_SECRET"]
        event = Webhook(secret).verify(await request.body(), dict(request.headers))
    except WebhookVerificationError as error:
        raise HTTPException(401, str(error)) from error
    order = packed.setdefault(request.headers["webhook-id"], event["data"]["payload"]["order"])
    return {"packed": order}


@web.get("/parcels/{order}")
async def show(order: int) -> dict[str, int]:
    if order not in packed.values():
        raise HTTPException(404, "not packed")
    return {"packed": order}
