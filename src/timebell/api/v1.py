"""`/api/v1`: every route of the API, and the OpenAPI 3.1 document that describes them."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI, Response
from fastapi.routing import APIRoute

from timebell.api import (
    audit,
    audit_log,
    backlogs,
    bulk,
    calendars,
    claims,
    dead_letters,
    events,
    external_workers,
    forecast,
    jobs,
    keys,
    nodes,
    openapi,
    operations,
    queues,
    schedules,
    secrets,
    targets,
    tenants,
    users,
)
from timebell.api.route import API_PREFIX, ApiRoute
from timebell.api.schemas import PROBLEM_RESPONSES, Problem, json_response
from timebell.feature import Feature
from timebell.features import FEATURES

API_MODULES = (  # the most requested first, because routes are matched in this order
    bulk, jobs, claims, external_workers, schedules, audit, backlogs, dead_letters, operations, queues, keys, users,
    tenants, nodes, audit_log, calendars, forecast, events, targets, secrets,
)  # fmt: skip
DESCRIPTION = """Durable job scheduler: runs jobs exactly when they are due, once, in the right time zone.

Every error is an RFC 9457 problem with a stable `code`. Listings are paged with `cursor`. A POST request with an
`Idempotency-Key` can be repeated for a day and returns the first response again. Changing a schedule requires
`If-Match`. `x-role` is the minimum role that an operation requires, `x-codes` are the error codes of a status that do
not depend on the values sent."""


@cache
def build_routes(features: tuple[Feature, ...]) -> APIRouter:
    """Return the routes of the API with those of the features, and of its OpenAPI document."""
    combined = APIRouter(prefix=API_PREFIX)
    of_features = [router for each in features if each.routes for router in import_module(each.routes).ROUTES]
    for router in (*(module.routes for module in API_MODULES), *of_features):
        for route in router.routes:
            # Not include_router(): included routers are matched once per level, and rebuilt for each application.
            assert isinstance(route, ApiRoute)
            prefixed = route.at(API_PREFIX)
            prefixed.responses = PROBLEM_RESPONSES | route.responses
            combined.routes.append(prefixed)

    @combined.get("/openapi.json", include_in_schema=False)
    async def get_openapi_document() -> Response:
        """Return the OpenAPI document. It contains nothing about this installation, so it requires no key."""
        return json_response(build_openapi(features))

    return combined


@cache
def build_openapi(features: tuple[Feature, ...] = FEATURES) -> dict[str, Any]:
    """Build the OpenAPI document of the API."""
    web = FastAPI(title="Timebell", version="1", description=DESCRIPTION, generate_unique_id_function=_operation_id)
    web.include_router(build_routes(features))
    document = web.openapi()
    document["components"]["schemas"]["Problem"] = Problem.model_json_schema()
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            operation["security"] = [{"key": []}]
    openapi.add_details(document)
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _operation_id(route: APIRoute) -> str:
    head, *rest = route.name.split("_")
    return head + "".join(map(str.title, rest))


def render_openapi() -> bytes:
    """Render the OpenAPI document as readable, sorted JSON; `make openapi` and the documentation site write it."""
    return orjson.dumps(build_openapi(), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)


if __name__ == "__main__":
    sys.stdout.buffer.write(render_openapi())
