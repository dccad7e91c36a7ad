"""`/api/v1`: every route of the API, and the OpenAPI 3.1 document that describes them."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI, Response
from fastapi.routing import APIRoute

from timebell.api import (
    audiences,
    audit,
    audit_log,
    backlogs,
    bulk,
    calendars,
    campaigns,
    connections,
    dead_letters,
    devices,
    events,
    external_workers,
    forecast,
    inbound_webhooks,
    jobs,
    keys,
    nodes,
    operations,
    queues,
    schedules,
    secrets,
    sources,
    targets,
    tenants,
    triggers,
)
from timebell.api.route import PREFIX, Guarded
from timebell.api.schemas import PROBLEMS, Problem, answer

PARTS = (  # those first that are asked for most, as a request looks for its route from the first on
    bulk, jobs, external_workers, schedules, audit, backlogs, dead_letters, operations, queues, keys, tenants, nodes,
    audit_log,
    calendars, forecast, events, targets, secrets,
    connections, sources, inbound_webhooks, triggers, devices, audiences, campaigns,
)  # fmt: skip
KEPT = (
    "methods", "name", "description", "tags", "status_code", "response_model", "response_class", "responses",
    "include_in_schema", "openapi_extra",
)  # fmt: skip
"""What a part says of a route."""
routes = APIRouter(prefix=PREFIX, responses=PROBLEMS)
for part in PARTS:
    assert part.routes.route_class is Guarded
    for route in part.routes.routes:
        # As one of ours: what is included is looked for twice, at each level anew, and made anew for each application.
        assert isinstance(route, APIRoute)
        own: dict[str, Any] = {name: getattr(route, name) for name in KEPT}
        routes.add_api_route(route.path, route.endpoint, route_class_override=Guarded, **own)

SUMMARY = """Things that must happen at a time: once, on time, in the right time zone.

Every error is an RFC 9457 problem with a stable `code`. Listings are paged by `cursor` and always end. A POST with an
`Idempotency-Key` can be repeated for a day and gets the first answer again. A change of a schedule needs `If-Match`.
`x-role` is the least role that an operation asks for."""


@cache
def openapi() -> dict[str, Any]:
    """The OpenAPI document of the API."""
    web = FastAPI(title="Timebell", version="1", description=SUMMARY, generate_unique_id_function=_named)
    web.include_router(routes)
    document = web.openapi()
    document["components"]["schemas"]["Problem"] = Problem.model_json_schema()
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            operation["security"] = [{"key": []}]
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _named(route: APIRoute) -> str:
    head, *rest = route.name.split("_")
    return head + "".join(map(str.title, rest))


def written() -> bytes:
    """The document as docs/reference/openapi.json has it."""
    return orjson.dumps(openapi(), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)


@routes.get("/openapi.json", include_in_schema=False)
async def openapi_document() -> Response:
    """The document; it says nothing about this installation, so anyone may read it."""
    return answer(openapi())


if __name__ == "__main__":
    sys.stdout.buffer.write(written())
