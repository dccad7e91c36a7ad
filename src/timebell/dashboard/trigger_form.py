"""Making a trigger, with a preview of what it would fire of the items that are there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from timebell.dashboard.api_client import part
from timebell.dashboard.fields import default_zone, from_json, number, problem, sent, texts
from timebell.dashboard.triggers import words
from timebell.dashboard.views import Page, See, View
from timebell.errors import InvalidInput, TimebellError
from timebell.model import condition
from timebell.model.trigger import Rule, Value, offsets_of
from timebell.recurrence import zone
from timebell.recurrence.zone_names import names as zone_names

FIRES = 6
ITEMS = 100  # of a source, that a preview looks at
FRESH = {"offsets": "-15m", "payload": "", "condition": ""}
TEXTS = ("name", "source", "column", "timezone", "recipients", "topic", "queue", "target")
NUMBERS = ("graceSeconds", "maxRetries", "timeoutSeconds")
routes = APIRouter(route_class=Page)


@routes.get("/ui/new/trigger")
async def new(request: Request, view: See) -> Response:
    """An empty form, or what its preview button sent."""
    return await _shown(view, {**FRESH, "timezone": default_zone(request, view), **dict(request.query_params)}, None)


@routes.post("/ui/new/trigger")
async def create(view: See) -> Response:
    """Make it; the scan that plans for the items there are begins."""
    made = await sent(view, "/triggers", body_of, _shown)
    return made if isinstance(made, Response) else view.back(f"/ui/triggers/{part(made['name'])}", "watching")


@routes.get("/ui/new/trigger/preview")
async def preview(request: Request, view: See) -> Response:
    """What the trigger in the form would fire."""
    return view.page("_trigger_preview", p=await previewed(view, dict(request.query_params)))


async def _shown(view: View, form: Mapping[str, str], wrong: Any, status: int = 200) -> Response:
    sources = (await view.get("/sources", limit=200))["items"]
    targets = (await view.get("/targets", limit=200))["items"]
    names = [one["name"] for one in sources]
    filled = {**FRESH, "timezone": "", "source": names[0] if len(names) == 1 else "", **form}
    return view.page(
        "trigger_form", status, form=filled, problem=wrong, p=await previewed(view, filled),
        sources=[(name, name) for name in names],
        targets=[(one["name"], one["name"]) for one in targets], zones=sorted(zone_names()),
    )  # fmt: skip


def body_of(form: Mapping[str, str]) -> dict[str, Any]:
    """A form as the API takes it. Raises InvalidInput."""
    body: dict[str, Any] = texts(form, *TEXTS)
    body |= {name: found for name in NUMBERS if (found := number(name, form.get(name, ""))) is not None}
    body["offsets"] = [one for one in re.split(r"[\s,]+", form.get("offsets", "").strip()) if one] or ["0"]
    if rules := conditions_of(form.get("condition", "")):
        body["condition"] = rules
    if (payload := from_json("payload", form.get("payload", ""))) is not None:
        body["payload"] = payload
    return body


def conditions_of(text: str) -> list[dict[str, Any]]:
    """Comparisons, one a line: `status eq active`, `age ge 18`, `done empty`. Raises InvalidInput."""
    found = []
    for line in filter(None, (each.strip() for each in text.splitlines())):
        field, *rest = line.split(None, 2)
        one: dict[str, Any] = {"field": field, "op": rest[0] if rest else ""}
        if len(rest) > 1:
            try:
                one["value"] = from_json("condition", rest[1])
            except InvalidInput:
                one["value"] = rest[1]
        found.append(one)
    condition.read(found)
    return found


async def previewed(view: View, form: Mapping[str, str]) -> dict[str, Any]:
    """In words, and the next fires of the first ITEMS of its source; or a `problem`."""
    try:
        body = body_of(form)
        rule = Rule(
            column=body.get("column", ""), offsets=offsets_of(body["offsets"]), timezone=body.get("timezone"),
            recipients=body.get("recipients"), condition=condition.read(body.get("condition")),
        )  # fmt: skip
        if rule.timezone is not None:
            zone(rule.timezone)
    except TimebellError as unfit:
        return {"problem": problem(unfit)}
    said = {
        "offsets": body["offsets"], "column": rule.column or "…", "recipients": rule.recipients, "unless": None,
        "timezone": rule.timezone, "condition": body.get("condition", []),
    }  # fmt: skip
    told: dict[str, Any] = {"problem": None, "words": words(said), "looked": 0, "fires": [], "columns": [], "odd": {}}
    if "source" not in body:
        return told
    answer = await view.ask("GET", f"/sources/{part(body['source'])}/items", limit=ITEMS)
    if answer.refused:
        return {"problem": answer.body}
    items = [one for one in answer.body["items"] if one["fields"] is not None]
    told |= {"looked": len(items), "more": answer.body["nextCursor"] is not None, "timezone": rule.timezone or "UTC"}
    told["columns"] = sorted({name for one in items for name in one["fields"]})
    if rule.column:
        told["fires"], told["odd"] = fires(rule, items, view.now)
    return told


def fires(
    rule: Rule, items: list[dict[str, Any]], now: datetime
) -> tuple[list[dict[str, Any]], dict[str, int]]:  # fmt: skip
    """The next fires of these items, and of how many nothing comes, by why."""
    found, odd = [], {"without": 0, "unreadable": 0, "unfit": 0, "past": 0}
    for one in items:
        places, value = rule.wanted(one["fields"])
        ahead = [(at, place) for place, at in places.items() if at > now]
        if value is Value.UNREADABLE:
            odd["unreadable"] += 1
        elif value is Value.NONE:
            odd["without"] += 1
        elif not condition.judge(rule.condition, one["fields"]).holds:
            odd["unfit"] += 1
        elif not ahead:
            odd["past"] += 1
        else:
            found += [{"at": at, "item": one["key"], "for": place.recipient} for at, place in ahead]
    return sorted(found, key=lambda one: (one["at"], one["item"], one["for"]))[:FIRES], odd
