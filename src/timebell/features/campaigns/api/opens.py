"""`/opens`: apps report that a message was opened, with a key of this scope."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from timebell.api.route import ApiRoute, Context, read_route
from timebell.api.schemas import Id, RequestBody, ResponseBody, json_response
from timebell.errors import NotFound
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=ApiRoute, tags=["campaigns"])


class OpenIn(RequestBody):
    campaign_id: Annotated[Id, Field(description="`campaignId` in the data of the message.")]
    token: Annotated[str, Field(min_length=1, max_length=4096, description="FCM token of the device.")]


class OpenOut(ResponseBody):
    """Whether the open is recorded: false if the campaign is unknown, or did not send to this device."""

    recorded: bool


@routes.post("/opens", response_model=OpenOut, **read_route(Role.OPERATOR))
async def report_open(body: OpenIn, ctx: Context) -> Response:
    """Report that a device opened the message of a campaign. The first report counts."""
    try:
        recorded = await ctx.app.campaigns.report_open(body.campaign_id, body.token, tenant_id=ctx.tenant_id)
    except NotFound:  # deleted, or removed by retention: nothing that the app could do
        recorded = False
    return json_response({"recorded": recorded})
