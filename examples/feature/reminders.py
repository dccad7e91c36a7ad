"""A feature in one module: reminders, with a client, a route of the API, a page and a metric.

Run: timebell dev reminders.py. Then: curl localhost:8700/api/v1/reminders --json '{"text": "tea", "at": "..."}'
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response

from timebell import Arrived, Timebell
from timebell.api.route import ApiRoute, Context, change_route
from timebell.api.schemas import RequestBody, json_response
from timebell.dashboard.pages import NavigationEntry, Pages
from timebell.dashboard.views import CurrentView, PageRoute
from timebell.feature import Feature
from timebell.features import FEATURES
from timebell.observe.metrics import MetricDefinition
from timebell.tenancy.roles import Role

TOPIC, CREATED = "reminders.due", "reminders_created_total"
api_routes, page_routes = APIRouter(route_class=ApiRoute, tags=["reminders"]), APIRouter(route_class=PageRoute)


class Reminders:
    """`app.reminders`."""

    def __init__(self, app: Timebell) -> None:
        self._app = app

    async def add(self, text: str, at: str, connection: Any = None) -> str:
        """Create the job of a reminder; return its id."""
        job = await self._app.schedule_at(TOPIC, at, payload={"text": text}, connection=connection)
        if self._app.service is not None:
            self._app.service.node.counters.of_features[CREATED].add("any")
        return job.id


class ReminderIn(RequestBody):
    """Body of POST /reminders."""

    text: str
    at: str


@api_routes.post("/reminders", status_code=201, **change_route("reminder.create", Role.EDITOR))
async def create_reminder(body: ReminderIn, ctx: Context) -> Response:
    """Create a reminder."""
    ctx.subject = await ctx.app.reminders.add(body.text, body.at, ctx.connection)
    return json_response({"id": ctx.subject}, 201)


@page_routes.get("/ui/reminders")
async def reminders(view: CurrentView) -> Response:
    """List the newest reminders."""
    return view.render("reminders", jobs=(await view.get("/jobs", topic=TOPIC))["items"])


class RemindersFeature(Feature):
    """Reminders."""

    routes = pages = __name__
    counters = {CREATED: ("any",)}

    def create_clients(self, app: Timebell) -> Mapping[str, Any]:
        return {"reminders": Reminders(app)}

    def metrics(self) -> Mapping[str, MetricDefinition]:
        return {CREATED: MetricDefinition("counter", ("channel",), "Reminders created on this node.")}


ROUTES = (api_routes,)
PAGES = Pages(
    routers=(page_routes,), templates=Path(__file__).parent / "templates",
    navigation=NavigationEntry("reminders", "/ui/reminders", "Reminders", "viewer", "M12 7v5l3 2"),
)  # fmt: skip
app = Timebell(features=(*FEATURES, RemindersFeature()))


@app.on(TOPIC)
async def remind(event: Arrived) -> None:
    print(f"Reminder: {event.payload['text']}")
