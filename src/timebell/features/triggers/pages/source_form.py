"""Form that creates a source, with a preview of how often it is read, and of the calls that this takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.fields import locate_problem, parse_number, submit, text_fields, to_problem
from timebell.dashboard.views import CurrentView, PageRoute, View
from timebell.errors import InvalidInput, TimebellError
from timebell.features.triggers.sources.call_plan import CallPlan, shortest_interval
from timebell.features.triggers.sources.sql_table import intervals

KINDS = [("webhook", "Webhook: rows are sent"), ("sql", "Table or query"), ("monday", "Board of monday.com")]
CHANGE_MODES = [
    ("compare", "Compare all rows"), ("cursor", "A column that rises"), ("outbox", "Outbox (PostgreSQL)"),
]  # fmt: skip
DAILY_CALLS = [
    ("200", "200: free, trial"), ("1000", "1,000: Basic, Standard"), ("10000", "10,000: Pro"),
    ("25000", "25,000: Enterprise"),
]  # fmt: skip
TEXT_OPTIONS = {
    "webhook": (),
    "sql": ("url", "table", "query", "key", "changes", "cursor"),
    "monday": ("boardId", "webhooks"),
}
NUMBER_OPTIONS = {"webhook": (), "sql": ("everySeconds", "sweepEverySeconds"), "monday": ("dailyCalls",)}
EMPTY_FORM = {"kind": "webhook", "changes": "compare", "dailyCalls": "200"}
routes = APIRouter(route_class=PageRoute)


@routes.get("/ui/new/source")
async def new(request: Request, view: CurrentView) -> Response:
    """Render an empty form, or the fields in the URL."""
    return await _render_form(view, dict(request.query_params), None)


@routes.post("/ui/new/source")
async def create(view: CurrentView) -> Response:
    """Create a source, and continue with a trigger on it."""
    created = await submit(view, "/sources", to_request_body, _render_form)
    if isinstance(created, Response):
        return created
    return view.redirect(f"/ui/new/trigger?source={quote_segment(created['name'])}", "")


@routes.api_route("/ui/new/source/preview", methods=["GET", "POST"])
async def preview(request: Request, view: CurrentView) -> Response:
    """Render the preview of the source in the form, as a fragment."""
    fields = view.form or dict(request.query_params)
    return view.render("partials/source_preview", preview=await build_preview(view, fields))


async def _render_form(view: View, form: Mapping[str, str], problem: Any, status: int = 200) -> Response:
    form = {**EMPTY_FORM, **form}
    secrets = await view.call_api("GET", "/secrets", limit=200)
    connections = await view.call_api("GET", "/connections", limit=200)
    return view.render(
        "source_form", status, form=form, problem=locate_problem(problem, form, {}),
        preview=await build_preview(view, form), kinds=KINDS, change_modes=CHANGE_MODES, daily_calls=DAILY_CALLS,
        secrets=_list_names(secrets), connections=_list_names(connections),
    )  # fmt: skip


def _list_names(response: Any) -> list[tuple[str, str]]:
    """Return the choices of a field that may be empty; none for users who may not list them."""
    items = [] if response.is_error else response.body["items"]
    return [("", "None"), *((item["name"], item["name"]) for item in items)]


def to_request_body(form: Mapping[str, str]) -> dict[str, Any]:
    """Convert form fields to a request body of the API. Raises InvalidInput."""
    kind = form.get("kind", EMPTY_FORM["kind"])
    if kind not in TEXT_OPTIONS:
        raise InvalidInput(f"kind is {kind!r:.40}.", code="INVALID_FIELDS", fix="Use webhook, sql or monday.")
    options: dict[str, Any] = text_fields(form, *TEXT_OPTIONS[kind])
    for name in NUMBER_OPTIONS[kind]:
        if (number := parse_number(name, form.get(name, ""))) is not None:
            options[name] = number
    if kind == "sql" and (secret := form.get("urlSecret")):
        options["url"] = {"secret": secret}
    if kind == "monday":
        if connection := form.get("connection"):
            options["token"] = {"connection": connection}
        elif secret := form.get("tokenSecret"):
            options["token"] = {"secret": secret}
        if columns := [name.strip() for name in form.get("columns", "").split(",") if name.strip()]:
            options["columns"] = columns
    return {**text_fields(form, "name"), "kind": kind, "options": options}


async def build_preview(view: View, form: Mapping[str, str]) -> dict[str, Any]:
    """Return how often the source is read and the calls a day, or a `problem`."""
    try:
        body = to_request_body(form)
        options = body["options"]
        if body["kind"] == "sql":
            changes, full_reads = intervals(options)
            return {"problem": None, "kind": "sql", "changes": changes, "interval": full_reads}
        if body["kind"] == "monday":
            plan = CallPlan.parse(options)
            boards = 1 + await _count_boards(view, options.get("token"))
            interval = max(plan.interval, shortest_interval(plan.daily_calls, boards))
            return {
                "problem": None, "kind": "monday", "limit": plan.daily_calls, "boards": boards, "interval": interval,
                "full_reads": round(86_400 / interval), "has_webhooks": "webhooks" in options,
            }  # fmt: skip
    except TimebellError as error:
        return {"problem": to_problem(error)}
    return {"problem": None, "kind": "webhook"}


async def _count_boards(view: View, token: Any) -> int:
    """Return the number of sources that share the calls of an account."""
    sources = (await view.get("/sources", limit=200))["items"]
    return sum(each["kind"] == "monday" and each["options"].get("token") == token for each in sources)
