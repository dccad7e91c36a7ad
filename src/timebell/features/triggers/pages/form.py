"""Form that creates a trigger, with a preview of the jobs for the existing items."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.fields import (
    default_timezone,
    locate_problem,
    parse_json,
    parse_number,
    submit,
    text_fields,
    to_problem,
)
from timebell.dashboard.views import CurrentView, PageRoute, View
from timebell.errors import InvalidInput, TimebellError
from timebell.features.triggers.model.trigger import ColumnStatus, TriggerRule, parse_edge, parse_offsets
from timebell.features.triggers.pages.triggers import describe_rule
from timebell.model import condition
from timebell.recurrence import zone
from timebell.recurrence.zone_names import accepted_names as zone_names

PREVIEW_FIRES = 6
PREVIEW_ITEMS = 100  # items of a source that a preview evaluates
EMPTY_FORM = {"offsets": "-15m", "payload": "", "condition": ""}
TEXT_FIELDS = ("name", "source", "column", "timezone", "zoneColumn", "edge", "recipients", "topic", "queue", "target")
NUMBER_FIELDS = ("graceSeconds", "maxRetries", "timeoutSeconds")
# Form fields by their names or error codes in the API, if they differ.
FORM_FIELDS = {"offset": "offsets", "INVALID_CONDITION": "condition", "retry": "maxRetries"}
routes = APIRouter(route_class=PageRoute)


@routes.get("/ui/new/trigger")
async def new(request: Request, view: CurrentView) -> Response:
    """Render an empty form, or the fields in the URL."""
    return await _render_form(
        view, {**EMPTY_FORM, "timezone": default_timezone(request, view), **dict(request.query_params)}, None
    )


@routes.post("/ui/new/trigger")
async def create(view: CurrentView) -> Response:
    """Create a trigger, which starts a scan that plans jobs for the existing items."""
    created = await submit(view, "/triggers", to_request_body, _render_form)
    if isinstance(created, Response):
        return created
    return view.redirect(f"/ui/triggers/{quote_segment(created['name'])}", "watching")


@routes.api_route("/ui/new/trigger/preview", methods=["GET", "POST"])
async def preview(request: Request, view: CurrentView) -> Response:
    """Render the preview of the trigger in the form, as a fragment."""
    fields = view.form or dict(request.query_params)
    return view.render("partials/trigger_preview", preview=await build_preview(view, fields))


async def _render_form(view: View, form: Mapping[str, str], problem: Any, status: int = 200) -> Response:
    sources = (await view.get("/sources", limit=200))["items"]
    targets = (await view.get("/targets", limit=200))["items"]
    source_names = [source["name"] for source in sources]
    fields = {**EMPTY_FORM, "timezone": "", "source": source_names[0] if len(source_names) == 1 else "", **form}
    return view.render(
        "trigger_form", status, form=fields, problem=locate_problem(problem, fields, FORM_FIELDS),
        preview=await build_preview(view, fields),
        sources=[(name, name) for name in source_names],
        targets=[(target["name"], target["name"]) for target in targets], zones=sorted(zone_names()),
    )  # fmt: skip


def to_request_body(form: Mapping[str, str]) -> dict[str, Any]:
    """Convert form fields to a request body of the API. Raises InvalidInput."""
    body: dict[str, Any] = text_fields(form, *TEXT_FIELDS)
    body |= {name: number for name in NUMBER_FIELDS if (number := parse_number(name, form.get(name, ""))) is not None}
    body["offsets"] = [offset for offset in re.split(r"[\s,]+", form.get("offsets", "").strip()) if offset] or ["0"]
    if comparisons := parse_conditions(form.get("condition", "")):
        body["condition"] = comparisons
    if (payload := parse_json("payload", form.get("payload", ""))) is not None:
        body["payload"] = payload
    return body


def parse_conditions(text: str) -> list[dict[str, Any]]:
    """Parse comparisons, one per line: `status eq active`, `age ge 18`, `done empty`.

    A value is JSON, or else text. Raises InvalidInput.
    """
    comparisons = []
    for line in filter(None, (each.strip() for each in text.splitlines())):
        field, *rest = line.split(None, 2)
        comparison: dict[str, Any] = {"field": field, "op": rest[0] if rest else ""}
        if len(rest) > 1:
            try:
                comparison["value"] = parse_json("condition", rest[1])
            except InvalidInput:
                comparison["value"] = rest[1]
        comparisons.append(comparison)
    condition.parse_comparisons(comparisons)
    return comparisons


async def build_preview(view: View, form: Mapping[str, str]) -> dict[str, Any]:
    """Return the rule in words and the next runs for the first PREVIEW_ITEMS items of the source, or a `problem`."""
    try:
        body = to_request_body(form)
        rule = TriggerRule(
            column=body.get("column", ""), offsets=parse_offsets(body["offsets"]), timezone=body.get("timezone"),
            zone_column=body.get("zoneColumn"), edge=parse_edge(body.get("edge", "start")),
            recipients=body.get("recipients"), condition=condition.parse_comparisons(body.get("condition")),
        )  # fmt: skip
        if rule.timezone is not None:
            zone(rule.timezone)
    except TimebellError as error:
        return {"problem": to_problem(error)}
    record = {
        "zoneColumn": rule.zone_column, "edge": rule.edge,
        "offsets": body["offsets"], "column": rule.column or "…", "recipients": rule.recipients, "unless": None,
        "timezone": rule.timezone, "condition": body.get("condition", []),
    }  # fmt: skip
    preview: dict[str, Any] = {
        "problem": None, "rule": describe_rule(record), "has_source": "source" in body, "item_count": 0,
        "has_more": False, "runs": [], "columns": [], "skipped": {}, "timezone": rule.timezone or "UTC",
    }  # fmt: skip
    if "source" not in body:
        return preview
    response = await view.call_api("GET", f"/sources/{quote_segment(body['source'])}/items", limit=PREVIEW_ITEMS)
    if response.is_error:
        return {"problem": response.body}
    items = [item for item in response.body["items"] if item["fields"] is not None]
    preview |= {"item_count": len(items), "has_more": response.body["nextCursor"] is not None}
    preview["columns"] = sorted({name for item in items for name in item["fields"]})
    if rule.column:
        preview["runs"], preview["skipped"] = next_fires(rule, items, view.now)
    return preview


def next_fires(
    rule: TriggerRule, items: list[dict[str, Any]], now: datetime
) -> tuple[list[dict[str, Any]], dict[str, int]]:  # fmt: skip
    """Return the next runs for these items, and the number of items without one, by reason."""
    runs, skipped = [], {"empty": 0, "unreadable": 0, "excluded": 0, "past": 0}
    for item in items:
        firings, status, timezone = rule.desired_firings(item["fields"])
        future_firings = [(at, key) for key, at in firings.items() if at > now]
        if status is ColumnStatus.UNREADABLE:
            skipped["unreadable"] += 1
        elif status is ColumnStatus.EMPTY:
            skipped["empty"] += 1
        elif not condition.evaluate(rule.condition, item["fields"]).holds:
            skipped["excluded"] += 1
        elif not future_firings:
            skipped["past"] += 1
        else:
            runs += [
                {"at": at, "item": item["key"], "recipient": key.recipient, "timezone": timezone}
                for at, key in future_firings
            ]
    return sorted(runs, key=lambda run: (run["at"], run["item"], run["recipient"]))[:PREVIEW_FIRES], skipped
