"""Pages of triggers and their sources: the list, one trigger, and its actions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Response

from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.fields import parse_json, to_problem
from timebell.dashboard.time_range import read_time_range
from timebell.dashboard.views import CurrentView, PageRoute
from timebell.errors import InvalidInput
from timebell.features.triggers.store import status

UNIT_LABELS = {"s": "s", "m": "min", "h": "h", "d": "days", "w": "weeks"}
OPERATOR_LABELS = {
    "eq": "is", "ne": "is not", "lt": "<", "le": "≤", "gt": ">", "ge": "≥", "in": "is one of",
    "not_in": "is none of", "empty": "is empty", "not_empty": "is not empty",
}  # fmt: skip
REAUTHORIZATION_ERROR = "re-authorization required"  # contained in the error of a source whose token is rejected
DONE_MESSAGES = {
    "pause": "paused",
    "resume": "resumed",
    "scan": "scanning",
    "fire": "item-fired",
    "skip": "item-skipped",
}
routes = APIRouter(route_class=PageRoute)


@routes.get("/ui/triggers")
async def triggers(view: CurrentView, cursor: str = "") -> Response:
    """List triggers, running scans and sources."""
    page = await view.get("/triggers", limit=50, cursor=cursor)
    sources = {source["name"]: source for source in (await view.get("/sources", limit=200))["items"]}
    for name in {record["source"] for record in page["items"]} - sources.keys():
        sources[name] = await view.get(f"/sources/{quote_segment(name)}")
    scans = (await view.get("/operations", kind="scan", state="running", limit=50))["items"]
    planned = await view.app.store.run(status.count_planned_jobs, [record["id"] for record in page["items"]])
    rows = [
        record | {
            "source_record": sources[record["source"]], "planned_jobs": planned[record["id"]],
            "rule": describe_rule(record), "state": state_label(record, sources[record["source"]], scans),
        }
        for record in page["items"]
    ]  # fmt: skip
    return view.render(
        "triggers", rows=rows, page=page, scans=scans, sources=list(sources.values()), source_label=source_label,
    )  # fmt: skip


@routes.get("/ui/triggers/{name}")
async def trigger(name: str, view: CurrentView, cursor: str = "") -> Response:
    """Show one trigger: its rule, source, scans and items."""
    record = await view.get(f"/triggers/{quote_segment(name)}")
    source_path = f"/sources/{quote_segment(record['source'])}"
    source = await view.get(source_path)
    time_range = read_time_range(view)
    period = time_range.parameters
    items = await view.get(f"{source_path}/items", limit=25, cursor=cursor, **period)
    not_fired = await view.get(f"/triggers/{quote_segment(name)}/not-fired", limit=10, **period)
    operations = (await view.get("/operations", kind="scan", limit=50))["items"]
    scans = [operation for operation in operations if operation["spec"].get("trigger") == record["id"]][:3]
    planned = await view.app.store.run(status.count_planned_jobs, [record["id"]])
    running_scans = [scan for scan in scans if scan["state"] == "running"]
    source["options"] = {option: redact_password(value) for option, value in source["options"].items()}
    return view.render(
        "trigger", 422 if time_range.problem else 200, trigger=record, source=source, items=items,
        not_fired=not_fired, scans=scans, time_range=time_range, planned_jobs=planned[record["id"]],
        rule=describe_rule(record), state=state_label(record, source, running_scans),
        secret_names=secret_names(source), needs_reauthorization=needs_reauthorization(source),
    )  # fmt: skip


@routes.get("/ui/triggers/{name}/item")
async def trigger_item(name: str, key: str, view: CurrentView) -> Response:
    """Show one item of a trigger: its firings and its latest jobs."""
    item = await view.get(f"/triggers/{quote_segment(name)}/why", item=key)
    return view.render("trigger_item", trigger=name, item=item)


@routes.api_route("/ui/triggers/{name}/preview", methods=["GET", "POST"])
async def preview(name: str, view: CurrentView, rows: str = "") -> Response:
    """Show when given rows would fire. Nothing is stored."""
    rows, problem, result = view.form.get("rows", rows), None, None
    try:
        parsed = parse_json("rows", rows)
    except InvalidInput as error:
        parsed, problem = None, to_problem(error)
    if parsed is not None:
        response = await view.call_api("POST", f"/triggers/{quote_segment(name)}/preview", {"rows": parsed})
        result, problem = (None, response.body) if response.is_error else (response.body["rows"], None)
    else:
        await view.get(f"/triggers/{quote_segment(name)}")
    return view.render(
        "trigger_preview", 422 if problem else 200, trigger=name, form={"rows": rows}, problem=problem, result=result
    )


@routes.post("/ui/triggers/{name}/{verb}")
async def perform_action(name: str, verb: str, view: CurrentView) -> Response:
    """Pause (with a reason), resume or scan a trigger; fire or skip one of its items."""
    if verb in ("fire", "skip"):
        key = view.form.get("item", "")
        await view.change("POST", f"/triggers/{quote_segment(name)}/{verb}", {"item": key})
        return view.redirect(
            f"/ui/triggers/{quote_segment(name)}/item?key={quote_segment(key)}", DONE_MESSAGES[verb]
        )  # fmt: skip
    reason = view.form.get("reason", "").strip()
    body = {"reason": reason} if verb == "pause" and reason else None
    await view.change("POST", f"/triggers/{quote_segment(name)}/{quote_segment(verb)}", body)
    return view.redirect(f"/ui/triggers/{quote_segment(name)}", DONE_MESSAGES.get(verb, ""))


def needs_reauthorization(source: Mapping[str, Any]) -> bool:
    """Return whether the source needs a new token."""
    return REAUTHORIZATION_ERROR in (source["error"] or "")


def state_label(
    record: Mapping[str, Any], source: Mapping[str, Any], scans: Sequence[Mapping[str, Any]]
) -> tuple[str, str]:
    """Return the CSS class and label of a trigger's state; `scans` are the running ones."""
    if not record["enabled"]:
        return "paused", "Paused"
    if source["orphanedAt"] or source["error"]:
        return source_label(source)
    if any(scan["spec"].get("trigger") == record["id"] for scan in scans):
        return "run", "Scanning"
    return "ok", "Up to date"


def source_label(source: Mapping[str, Any]) -> tuple[str, str]:
    """Return the CSS class and label of a source's state."""
    if needs_reauthorization(source):
        return "retry", "Token required"
    if source["orphanedAt"]:
        return "bad", "Orphaned"
    return ("bad", "Unreadable") if source["error"] else ("ok", "Up to date")


def secret_names(source: Mapping[str, Any]) -> list[str]:
    """Return the names of the secrets that a source uses."""
    return [value["secret"] for value in source["options"].values() if isinstance(value, dict) and "secret" in value]


def redact_password(value: Any) -> Any:
    """Remove the credentials of a URL from an option."""
    return re.sub(r"(?<=://)[^/@\s]*@", "…@", value) if isinstance(value, str) else value


def describe_rule(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Describe the rule of a trigger as alternating (text, code).

    E.g. 15 min before `start_at`, for each in `users`, if `status` is `active`.
    """
    offsets = [_describe_offset(offset) for offset in record["offsets"]]
    column = f"{' and '.join(offsets)} {'the end of ' if record['edge'] == 'end' else ''}"
    parts = [(column, record["column"])]
    if record["recipients"]:
        parts.append((", for each in ", record["recipients"]))
    for n, comparison in enumerate(record["condition"]):
        value = comparison.get("value")
        parts.append((" and " if n else ", if ", comparison["field"]))
        parts.append(
            (
                f" {OPERATOR_LABELS.get(comparison['op'], comparison['op'])} ",
                "" if value is None else value if isinstance(value, str) else json.dumps(value),
            )
        )
    if record["unless"]:
        parts.append((", unless ", record["unless"]))
    if record["zoneColumn"]:
        parts.append((", local times in the zone in ", record["zoneColumn"]))
    if record["timezone"]:
        parts.append((" or else " if record["zoneColumn"] else ", local times in ", record["timezone"]))
    return parts


def _describe_offset(text: str) -> str:
    match = re.fullmatch(r"([+-])(\d+)([smhdw])", text)
    if match is None:
        return "at" if text == "0" else f"{text} from"
    unit = UNIT_LABELS[match[3]].rstrip("s" if match[2] == "1" and len(UNIT_LABELS[match[3]]) > 1 else "")
    return f"{match[2]} {unit} {'before' if match[1] == '-' else 'after'}"
