"""Making and changing a schedule, with a preview of exactly when it will fire."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from timebell.dashboard.api_client import Answer, part
from timebell.dashboard.fields import default_zone, from_json, number, plain, sent
from timebell.dashboard.fields import problem as problem_of
from timebell.dashboard.schedules import FIRES, body_of_revision, differences
from timebell.dashboard.views import Page, See, View
from timebell.errors import InvalidInput
from timebell.recurrence.zone_names import names as zone_names
from timebell.settings import duration

KINDS = ("cron", "interval", "rrule", "dates", "recurrence")
FIELDS = {
    "cron": "cronExpression", "interval": "interval", "rrule": "rrule", "dates": "dates", "recurrence": "recurrence",
}  # fmt: skip
NUMBERS = ("timeoutSeconds", "missedAfterSeconds", "jitterSeconds", "maxRetries", "priority", "maxRuns")
TEXTS = ("description", "timezone", "topic", "queue", "calendar", "roll", "startAt", "endAt", "target")
TESTED = (
    "topic",
    "timezone",
    "payload",
    "target",
    "queue",
    "priority",
    "maxRetries",
    "timeoutSeconds",
)  # what a job has of it
FRESH = {
    "kind": "cron", "when": "30 2 * * *", "timezone": "", "name": "", "topic": "", "payload": "null",
    "overlapPolicy": "skip", "catchUp": "latest",
}  # fmt: skip
routes = APIRouter(route_class=Page)


@routes.get("/ui/schedules/new")
async def new(request: Request, view: See) -> Response:
    """An empty form, or what its preview button sent."""
    given = dict(request.query_params)
    form = {**FRESH, "timezone": default_zone(request, view), **given}
    return await _shown(view, form, None)


@routes.post("/ui/schedules/new")
async def create(view: See) -> Response:
    """Make it."""

    def read(form: Mapping[str, str]) -> dict[str, Any]:
        return {name: value for name, value in body_of(form).items() if value is not None}

    made = await sent(view, "/schedules", read, _shown)
    return made if isinstance(made, Response) else view.back(f"/ui/schedules/{part(made['id'])}", "created")


@routes.post("/ui/schedules/new/test")
async def test(view: See) -> Response:
    """Fire once what is in the form, as a job of its own: no schedule is made or changed."""

    def read(form: Mapping[str, str]) -> dict[str, Any]:
        body = body_of(form)
        return {name: body[name] for name in TESTED if body.get(name) is not None}

    made = await sent(view, "/jobs", read, _shown)
    return made if isinstance(made, Response) else view.back(f"/ui/jobs/{part(made['id'])}", "tried")


@routes.get("/ui/schedules/{id}/edit")
async def edit(request: Request, id: str, view: See) -> Response:
    """The form of one that is there."""
    one, newest = await _read(view, id)
    given = dict(request.query_params) if "when" in request.query_params else {}
    form = {**form_of(body_of_revision(one["name"], newest)), "revision": str(one["revision"]), **given}
    return await _shown(view, form, None, one)


@routes.post("/ui/schedules/{id}/edit")
async def save(id: str, view: See) -> Response:
    """Change it, unless somebody else has since: then both are shown."""
    one, newest = await _read(view, id)
    was = view.form.get("revision", "")
    try:
        body = body_of(view.form)
    except InvalidInput as unfit:
        return await _shown(view, view.form, problem_of(unfit), one, status=422)
    path = f"/schedules/{part(id)}"
    history = (await view.get(f"{path}/revisions"))["items"]
    mine = next((each for each in history if str(each["revision"]) == was), newest)
    # What was not touched in the form stays as it is, also where a form shows less than there is.
    before = body_of(form_of(body_of_revision(one["name"], mine)))
    patch = {name: value for name, value in body.items() if value != before.get(name)}
    patch |= dict.fromkeys(name for name in before if name not in body and name not in FIELDS.values())
    answer = await view.ask("PATCH", path, patch, headers={"If-Match": f'"{was}"'})
    if answer.status == 412:
        return await _shown(view, view.form, answer.body, one, status=412, theirs=differences(mine, newest))
    if answer.refused:
        return await _shown(view, view.form, answer.body, one, status=answer.status)
    return view.back(path.replace("/schedules", "/ui/schedules"), "saved")


@routes.get("/ui/preview")
async def preview(request: Request, view: See) -> Response:
    """When what is in the form would fire."""
    return view.page("_preview", p=await _previewed(view, dict(request.query_params)))


async def _shown(
    view: View, form: Mapping[str, str], problem: Any, one: Any = None, *, status: int = 200, theirs: Any = None
) -> Response:  # fmt: skip
    previewed = await _previewed(view, form)
    targets = await view.get("/targets", limit=200)
    return view.page(
        "schedule_form", status, form={**FRESH, **form}, problem=problem, one=one, theirs=theirs, p=previewed,
        zones=sorted(zone_names()), targets=[each["name"] for each in targets["items"]],
    )  # fmt: skip


async def _previewed(view: View, form: Mapping[str, str]) -> dict[str, Any]:
    """`says`, `fires` and `notes`; or `problem`."""
    try:
        body = body_of({**form, "payload": "null"})
    except InvalidInput as unfit:
        return {"problem": problem_of(unfit)}
    body = {name: value for name, value in body.items() if value is not None}
    body |= {"name": body.get("name") or "preview", "topic": body.get("topic") or "preview"}
    answer: Answer = await view.ask("POST", "/schedules/preview", body, count=FIRES)
    if answer.refused:
        return {"problem": answer.body}
    found = answer.body
    return {
        "problem": None, "says": found["description"], "fires": found["next"], "notes": found["notes"],
        "timezone": found["schedule"]["timezone"],
    }  # fmt: skip


async def _read(view: View, id_: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schedule and its newest revision."""
    one = await view.get(f"/schedules/{part(id_)}")
    return one, (await view.get(f"/schedules/{part(id_)}/revisions"))["items"][0]


def body_of(form: Mapping[str, str]) -> dict[str, Any]:
    """A form as the API takes it; None: left out, so the default. Raises InvalidInput."""
    kind, when = form.get("kind", "cron"), form.get("when", "").strip()
    if kind not in KINDS:
        raise InvalidInput(f"There is no kind {kind!r:.20}.", code="INVALID_RECURRENCE", fix=f"Use {', '.join(KINDS)}.")
    body: dict[str, Any] = {name: form.get(name, "").strip() or None for name in ("name", *TEXTS)}
    body |= {name: number(name, form.get(name, "")) for name in NUMBERS}
    body |= {
        FIELDS[kind]: _when(kind, when), "payload": from_json("payload", form.get("payload", "")),
        "overlapPolicy": form.get("overlapPolicy") or None, "labels": _labels(form.get("labels", "")),
    }  # fmt: skip
    catch_up = {
        "policy": form.get("catchUp") or None, "window": form.get("catchUpWindow", "").strip() or None,
        "limit": number("catchUpLimit", form.get("catchUpLimit", "")),
    }  # fmt: skip
    body["catchUp"] = {name: value for name, value in catch_up.items() if value is not None} or None
    dst = {name: form[name] for name in ("gap", "fold") if form.get(name)}
    body["dst"] = dst if dst and kind != "dates" and kind != "recurrence" else None
    return body


def form_of(body: Mapping[str, Any]) -> dict[str, str]:
    """What the API takes, as a form shows it."""
    kind = next(kind for kind in KINDS if FIELDS[kind] in body)
    value = body[FIELDS[kind]]
    if kind == "interval":
        every = value.get("every")
        short = every if every else f"PT{value['everyMs'] / 1000:g}S"
        value = short if set(value) <= {"every", "everyMs", "anchor"} else value
    when = "\n".join(value) if kind == "dates" else value if isinstance(value, str) else json.dumps(value)
    catch_up, dst = body.get("catchUp", {}), body.get("dst", {})
    form = {name: plain(body[name]) for name in ("name", *TEXTS, *NUMBERS) if body.get(name) is not None}
    target = body.get("target")
    form |= {
        "kind": kind, "when": when, "payload": json.dumps(body.get("payload"), ensure_ascii=False, indent=1),
        "overlapPolicy": body.get("overlapPolicy", ""), "catchUp": catch_up.get("policy", ""),
        "catchUpWindow": plain(catch_up.get("window", "")), "catchUpLimit": plain(catch_up.get("limit", "")),
        "gap": dst.get("gap", ""), "fold": dst.get("fold", ""),
        "labels": ", ".join(f"{name}={text}" for name, text in (body.get("labels") or {}).items()),
    }  # fmt: skip
    if isinstance(target, dict):
        form["target"] = target.get("name", "")
    if retry := body.get("retry"):
        form["maxRetries"] = str(retry["attempts"] - 1)
    return form


def _when(kind: str, text: str) -> Any:
    if not text:
        raise InvalidInput("Nothing says when it fires.", code="RECURRENCE_MISSING", fix="Write it, e.g. 30 2 * * *.")
    if kind == "dates":
        return [line.strip() for line in text.splitlines() if line.strip()]
    if kind == "recurrence" or (kind == "interval" and text.startswith("{")):
        return from_json("recurrence", text)
    if kind == "interval":
        seconds = None if text.upper().startswith("P") else duration(text)
        return {"every": text.upper()} if seconds is None else {"everyMs": round(min(seconds, 1e12) * 1000)}
    return text


def _labels(text: str) -> dict[str, str] | None:
    found = {}
    for pair in filter(None, (each.strip() for each in text.split(","))):
        name, equals, value = pair.partition("=")
        if not equals:
            raise InvalidInput(f"The label {pair!r:.40} has no value.", code="INVALID_LABELS", fix="E.g. team=billing")
        found[name.strip()] = value.strip()
    return found or None
