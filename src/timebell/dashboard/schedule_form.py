"""Forms that create and edit a schedule, with a preview of its next runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.fields import (
    InvalidField,
    default_timezone,
    format_value,
    locate_problem,
    parse_json,
    parse_number,
    submit,
    to_problem,
)
from timebell.dashboard.schedules import UPCOMING_FIRES, changed_fields, revision_body
from timebell.dashboard.views import CurrentView, PageRoute, View
from timebell.durations import parse_duration
from timebell.errors import InvalidInput
from timebell.recurrence.zone_names import accepted_names as zone_names
from timebell.store.jobs import waiting

RECURRENCE_KINDS = ("cron", "interval", "rrule", "dates", "recurrence")
RECURRENCE_FIELDS = {
    "cron": "cronExpression", "interval": "interval", "rrule": "rrule", "dates": "dates", "recurrence": "recurrence",
}  # fmt: skip
NUMBER_FIELDS = ("timeoutSeconds", "missedAfterSeconds", "jitterSeconds", "maxRetries", "priority", "maxRuns")
TEXT_FIELDS = ("description", "timezone", "topic", "queue", "calendar", "roll", "startAt", "endAt", "target")
# Form fields by their names in the API, if they differ.
FORM_FIELDS = {
    **dict.fromkeys(RECURRENCE_FIELDS.values(), "when"), "catchUp": "catchUpWindow",
    "catchUp/limit": "catchUpLimit", "retry": "maxRetries",
}  # fmt: skip
# Fields of the form that also exist on a job.
TEST_JOB_FIELDS = ("topic", "timezone", "payload", "target", "queue", "priority", "maxRetries", "timeoutSeconds")
EMPTY_FORM = {
    "kind": "cron", "when": "30 2 * * *", "timezone": "", "name": "", "topic": "", "payload": "",
    "overlapPolicy": "skip", "catchUp": "latest",
}  # fmt: skip
MAX_SUGGESTED_TOPICS = 500
routes = APIRouter(route_class=PageRoute)


@routes.get("/ui/schedules/new")
async def new(request: Request, view: CurrentView) -> Response:
    """Render an empty form, or the fields in the URL."""
    form = {**EMPTY_FORM, "timezone": default_timezone(request, view), **dict(request.query_params)}
    return await _render_form(view, form, None)


@routes.post("/ui/schedules/new")
async def create(view: CurrentView) -> Response:
    """Create a schedule."""

    def parse_form(form: Mapping[str, str]) -> dict[str, Any]:
        return {name: value for name, value in to_request_body(form).items() if value is not None}

    created = await submit(view, "/schedules", parse_form, _render_form)
    if isinstance(created, Response):
        return created
    return view.redirect(f"/ui/schedules/{quote_segment(created['id'])}", "created")


@routes.post("/ui/schedules/new/test")
async def fire_test(view: CurrentView) -> Response:
    """Create one job from the contents of the form. No schedule is created or changed."""

    def parse_form(form: Mapping[str, str]) -> dict[str, Any]:
        body = to_request_body(form)
        return {name: body[name] for name in TEST_JOB_FIELDS if body.get(name) is not None}

    created = await submit(view, "/jobs", parse_form, _render_form)
    if isinstance(created, Response):
        return created
    return view.redirect(f"/ui/jobs/{quote_segment(created['id'])}", "fired-once")


@routes.get("/ui/schedules/{id}/edit")
async def edit(id: str, view: CurrentView) -> Response:
    """Render the form of an existing schedule."""
    schedule, newest = await _load_schedule(view, id)
    form = {
        **to_form(revision_body(schedule["name"], newest)),
        "revision": str(schedule["revision"]),
        "etag": schedule["etag"],
    }
    return await _render_form(view, form, None, schedule)


@routes.post("/ui/schedules/{id}/edit")
async def save(id: str, view: CurrentView) -> Response:
    """Update a schedule. If another user has changed it since the form was loaded, show their changes instead."""
    schedule, newest = await _load_schedule(view, id)
    if "preview" in view.form:
        return await _render_form(view, view.form, None, schedule)
    loaded_revision = view.form.get("revision", "")
    try:
        body = to_request_body(view.form)
    except InvalidInput as error:
        return await _render_form(view, view.form, to_problem(error), schedule, status=422)
    path = f"/schedules/{quote_segment(id)}"
    history = (await view.get(f"{path}/revisions"))["items"]
    loaded = next((revision for revision in history if str(revision["revision"]) == loaded_revision), newest)
    # Send only the fields that the user changed: the form cannot represent every setting of a schedule.
    before = to_request_body(to_form(revision_body(schedule["name"], loaded)))
    patch = {name: value for name, value in body.items() if value != before.get(name)}
    patch |= dict.fromkeys(name for name in before if name not in body and name not in RECURRENCE_FIELDS.values())
    response = await view.call_api("PATCH", path, patch, headers={"If-Match": view.form.get("etag", "")})
    if response.status == 412:
        conflicts = changed_fields(loaded, newest)
        return await _render_form(view, view.form, response.body, schedule, status=412, conflicts=conflicts)
    if response.is_error:
        return await _render_form(view, view.form, response.body, schedule, status=response.status)
    return view.redirect(path.replace("/schedules", "/ui/schedules"), "saved")


@routes.api_route("/ui/preview", methods=["GET", "POST"])
async def preview(request: Request, view: CurrentView) -> Response:
    """Render the next runs of the schedule in the form, as a fragment."""
    fields = view.form or dict(request.query_params)
    return view.render("partials/schedule_preview", preview=await _build_preview(view, fields))


async def _render_form(
    view: View, form: Mapping[str, str], problem: Any, schedule: Any = None, *, status: int = 200, conflicts: Any = None
) -> Response:  # fmt: skip
    preview = await _build_preview(view, form)
    targets = await view.get("/targets", limit=200)
    handled = await view.app.store.run(waiting.list_handled, view.caller.tenant_id)
    return view.render(
        "schedule_form", status, form={**EMPTY_FORM, **form}, problem=locate_problem(problem, form, FORM_FIELDS),
        schedule=schedule, conflicts=conflicts, preview=preview, zones=sorted(zone_names()),
        topics=sorted(topic for topic in handled.exact if not topic.startswith("@"))[:MAX_SUGGESTED_TOPICS],
        targets=[(target["name"], target["name"]) for target in targets["items"]],
    )  # fmt: skip


async def _build_preview(view: View, form: Mapping[str, str]) -> dict[str, Any]:
    """Return `description`, `runs`, `notes` and `timezone` of the schedule in the form; or its `problem`."""
    try:
        body = to_request_body({**form, "payload": "null"})
    except InvalidInput as error:
        return {"problem": to_problem(error)}
    body = {name: value for name, value in body.items() if value is not None}
    body |= {"name": body.get("name") or "preview", "topic": body.get("topic") or "preview"}
    response = await view.call_api("POST", "/schedules/preview", body, count=UPCOMING_FIRES)
    if response.is_error:
        return {"problem": response.body}
    result = response.body
    warnings = result["warnings"] if form.get("topic", "").strip() else []
    return {
        "problem": None, "description": result["description"], "runs": result["next"],
        "notes": [*warnings, *result["notes"]],
        "timezone": result["schedule"]["timezone"],
    }  # fmt: skip


async def _load_schedule(view: View, id_: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the schedule and its newest revision."""
    schedule = await view.get(f"/schedules/{quote_segment(id_)}")
    return schedule, (await view.get(f"/schedules/{quote_segment(id_)}/revisions"))["items"][0]


def to_request_body(form: Mapping[str, str]) -> dict[str, Any]:
    """Convert form fields to a request body of the API; None: use the default. Raises InvalidInput."""
    kind, when = form.get("kind", "cron"), form.get("when", "").strip()
    if kind not in RECURRENCE_KINDS:
        raise InvalidInput(
            f"There is no kind {kind!r:.20}.", code="INVALID_RECURRENCE", fix=f"Use {', '.join(RECURRENCE_KINDS)}."
        )
    body: dict[str, Any] = {name: form.get(name, "").strip() or None for name in ("name", *TEXT_FIELDS)}
    body |= {name: parse_number(name, form.get(name, "")) for name in NUMBER_FIELDS}
    body |= {
        RECURRENCE_FIELDS[kind]: _parse_recurrence(kind, when),
        "payload": parse_json("payload", form.get("payload", "")),
        "overlapPolicy": form.get("overlapPolicy") or None, "labels": _parse_labels(form.get("labels", "")),
    }  # fmt: skip
    catch_up = {
        "policy": form.get("catchUp") or None, "window": form.get("catchUpWindow", "").strip() or None,
        "limit": parse_number("catchUpLimit", form.get("catchUpLimit", "")),
    }  # fmt: skip
    body["catchUp"] = {name: value for name, value in catch_up.items() if value is not None} or None
    dst = {name: form[name] for name in ("gap", "fold") if form.get(name)}
    body["dst"] = dst if dst and kind != "dates" and kind != "recurrence" else None
    return body


def to_form(body: Mapping[str, Any]) -> dict[str, str]:
    """Convert a request body of the API to form fields."""
    kind = next(kind for kind in RECURRENCE_KINDS if RECURRENCE_FIELDS[kind] in body)
    value = body[RECURRENCE_FIELDS[kind]]
    if kind == "interval":
        every = value.get("every")
        duration = every if every else f"PT{value['everyMs'] / 1000:g}S"
        value = duration if set(value) <= {"every", "everyMs", "anchor"} else value
    when = "\n".join(value) if kind == "dates" else value if isinstance(value, str) else json.dumps(value)
    catch_up, dst = body.get("catchUp", {}), body.get("dst", {})
    form = {
        name: format_value(body[name]) for name in ("name", *TEXT_FIELDS, *NUMBER_FIELDS) if body.get(name) is not None
    }
    target = body.get("target")
    form |= {
        "kind": kind, "when": when,
        "payload": "" if body.get("payload") is None else json.dumps(body["payload"], ensure_ascii=False, indent=1),
        "overlapPolicy": body.get("overlapPolicy", ""), "catchUp": catch_up.get("policy", ""),
        "catchUpWindow": format_value(catch_up.get("window", "")),
        "catchUpLimit": format_value(catch_up.get("limit", "")),
        "gap": dst.get("gap", ""), "fold": dst.get("fold", ""),
        "labels": ", ".join(f"{name}={text}" for name, text in (body.get("labels") or {}).items()),
    }  # fmt: skip
    if isinstance(target, dict):
        form["target"] = target.get("name", "")
    if retry := body.get("retry"):
        form["maxRetries"] = str(retry["attempts"] - 1)
    return form


def _parse_recurrence(kind: str, text: str) -> Any:
    if not text:
        raise InvalidField(
            "when", "The schedule has no recurrence rule.", code="RECURRENCE_MISSING",
            fix="Enter one, e.g. 30 2 * * *.",
        )  # fmt: skip
    if kind == "dates":
        return [line.strip() for line in text.splitlines() if line.strip()]
    if kind == "recurrence" or (kind == "interval" and text.startswith("{")):
        return parse_json("recurrence", text)
    if kind == "interval":
        seconds = None if text.upper().startswith("P") else parse_duration(text)
        return {"every": text.upper()} if seconds is None else {"everyMs": round(min(seconds, 1e12) * 1000)}
    return text


def _parse_labels(text: str) -> dict[str, str] | None:
    labels = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = pair.partition("=")
        if not equals:
            raise InvalidInput(f"The label {pair!r:.40} has no value.", code="INVALID_LABELS", fix="E.g. team=billing")
        labels[name.strip()] = value.strip()
    return labels or None
