"""Jobs: what waits, runs, is stuck; and what happened to one, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse

from timebell.api.job_fields import shown_job
from timebell.client.validation import uuid_of
from timebell.dashboard.api_client import part
from timebell.dashboard.rendering import HOLDS, instant, lag, pretty, span
from timebell.dashboard.views import Page, See, View
from timebell.errors import InvalidInput
from timebell.model.job import STATE_WORDS
from timebell.model.payload import read_json
from timebell.settings import duration
from timebell.store.audit import overview as rows
from timebell.tenancy.roles import Role, require

STATES = ("pending", "running", "failed", "completed", "skipped", "cancelled")
# The words of the filter -> what the API calls them.
WORDS = {
    "status": "status", "topic": "topic", "owner": "ownerId", "schedule": "scheduleId", "key": "key", "queue": "queue",
    "attempts": "minAttempts", "lag": "lag",
}  # fmt: skip
COLUMNS = {"topic": "topic", "ownerId": "owner_id", "scheduleId": "schedule_id", "key": "key", "queue": "queue"}
routes = APIRouter(route_class=Page)


@routes.get("/ui/jobs")
async def jobs(view: See, q: str = "", cursor: str = "") -> Response:
    """A page of them, filtered by words such as `status:failed topic:erp.sync attempts:2`."""
    if (id_ := uuid_of(q.strip())) is not None:
        return RedirectResponse(f"/ui/jobs/{id_}", 303)
    wanted, problem = await wanted_of(view, q)
    late = problem is None and "lag" in wanted
    status = 422
    found: dict[str, Any] = {"items": [], "nextCursor": None}
    if late:
        found["items"] = await _late(view, wanted)
    elif problem is None:
        answer = await view.ask("GET", "/jobs", limit=50, cursor=cursor, **wanted)
        if answer.refused:
            problem, status = answer.body, answer.status
        else:
            found = answer.body
    rest = " ".join(word for word in q.split() if not word.startswith("status:"))
    tenant_id = view.caller.tenant_id
    ids = {job["scheduleId"] for job in found["items"] if job["scheduleId"]}
    names = await view.app.store.run(rows.names, tenant_id, ids) if ids else {}
    return view.page(
        "jobs", 200 if problem is None else status, names=names, found=found, q=q, problem=problem, states=STATES,
        counts=view.request.app.state.now.counts(tenant_id), status=wanted.get("status", ""), words=WORDS, rest=rest,
        late=late,
    )  # fmt: skip


async def wanted_of(view: View, q: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The filter as the API takes it, or what is wrong with it."""
    wanted: dict[str, Any] = {}
    for word in q.split():
        name, colon, value = word.partition(":")
        if not colon:
            name, value = "topic", word
        if name not in WORDS or not value:
            known = ", ".join(f"{each}:" for each in WORDS)
            return {}, {"detail": f"{word!r:.60} is no filter.", "fix": f"There are {known} or a topic.",
                        "code": "INVALID_FILTER"}  # fmt: skip
        if name == "schedule" and uuid_of(value) is None:
            named = (await view.get("/schedules", name=value, limit=1))["items"]
            if not named:
                return {}, {"detail": f"There is no schedule {value!r:.60}.", "fix": "Give its name or id.",
                            "code": "SCHEDULE_NOT_FOUND"}  # fmt: skip
            value = named[0]["id"]
        wanted[WORDS[name]] = value.lstrip(">=") if name in ("attempts", "lag") else value
        if name == "lag":
            wanted["lag"] = duration(wanted["lag"])
            if wanted["lag"] is None:
                return {}, {"detail": f"{word!r:.60} has no lag.", "fix": "Write lag:>5s, or lag:>200ms.",
                            "code": "INVALID_FILTER"}  # fmt: skip
    return wanted, None


async def _late(view: View, wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of the last hour that started late. Raises InvalidInput (STATUS_INVALID)."""
    columns = {COLUMNS[name]: value for name, value in wanted.items() if name in COLUMNS}
    if status := wanted.get("status"):
        if status not in STATE_WORDS:
            raise InvalidInput(
                f"There is no status {status!r:.40}.", code="STATUS_INVALID", fix=f"Use {', '.join(STATE_WORDS)}."
            )
        columns["state"] = {state.value for state in STATE_WORDS[status]}
    if "schedule_id" in columns:
        columns["schedule_id"] = uuid_of(columns["schedule_id"])
    if (least := wanted.get("minAttempts", "")).isdecimal():
        columns["attempt"] = int(least[:9])
    span = timedelta(seconds=min(wanted["lag"], 1e9))
    found = await view.app.store.run(rows.late, view.caller.tenant_id, view.now, span, columns)
    return [shown_job(job) for job in found]


@routes.get("/ui/jobs/{id}")
async def job(id: str, view: See) -> Response:
    """One, as a timeline."""
    one = await view.get(f"/jobs/{part(id)}")
    name = None
    if one["scheduleId"]:
        answer = await view.ask("GET", f"/schedules/{part(one['scheduleId'])}")
        name = None if answer.refused else answer.body["name"]
    nodes = {each["id"]: each["name"] for each in (await view.get("/nodes"))["items"]}
    return view.page("job", one=one, schedule=name, steps=steps(one, nodes), nodes=nodes)


@routes.post("/ui/jobs/{id}/retry")
async def retry(id: str, view: See) -> Response:
    """Try it again."""
    await view.send("POST", f"/jobs/{part(id)}/retry")
    return view.back(f"/ui/jobs/{part(id)}", "retried")


@routes.get("/ui/jobs/{id}/edit")
async def edit(id: str, view: See) -> Response:
    """What a failed one carried, to be mended. Raises Refused (ROLE_TOO_LOW)."""
    require(view.caller.role, Role.EDITOR)
    one = await view.get(f"/jobs/{part(id)}")
    return view.page("job_edit", one=one, text=pretty(one["payload"]), problem=None)


@routes.post("/ui/jobs/{id}/edit")
async def retry_edited(id: str, view: See) -> Response:
    """A new job with what the form has, in place of the failed one."""
    one = await view.get(f"/jobs/{part(id)}")
    text = view.form.get("payload", "")
    try:
        payload = read_json(text.encode(errors="replace"), "payload")
    except InvalidInput as unfit:
        problem = {"detail": unfit.message, "fix": unfit.fix, "code": unfit.code}
        return view.page("job_edit", 422, one=one, text=text, problem=problem)
    answer = await view.ask("POST", f"/jobs/{part(id)}/retry", {"payload": payload})
    if answer.refused:
        return view.page("job_edit", answer.status, one=one, text=text, problem=answer.body)
    return view.back(f"/ui/jobs/{part(answer.body['id'])}", "edited")


@routes.post("/ui/jobs/{id}/cancel")
async def cancel(id: str, view: See) -> Response:
    """Keep it from starting."""
    await view.send("POST", f"/jobs/{part(id)}/cancel")
    return view.back(f"/ui/jobs/{part(id)}", "cancelled")


def steps(job: dict[str, Any], nodes: dict[str, str]) -> list[dict[str, Any]]:
    """What happened: (when, how it looks, what, more)."""
    found = [_step(job["createdAt"], "wait", "Made", "") | {"due": job["runAt"]}]
    before = None
    for tried in job["attempts"]:
        number = tried["attempt"]
        if tried.get("startedAt"):
            found.append(_began(job, number, tried["startedAt"], tried.get("node"), before, nodes))
        if tried.get("endedAt"):
            before = tried["endedAt"]
            said = f"{tried.get('code') or ''}: {tried.get('error') or ''}".strip(": ")
            found.append(_step(before, "bad", f"Attempt {number} failed", said))
    ended = {tried["attempt"] for tried in job["attempts"]}
    if job["firedAt"] and job["attemptNumber"] not in ended:
        found.append(_began(job, job["attemptNumber"], job["firedAt"], job["nodeId"], before, nodes))
    looks = {"completed": ("ok", "Done"), "failed": ("bad", "Dead: no attempt is left"),
             "cancelled": ("skip", "Cancelled"), "skipped": ("missed", f"Skipped: {job['reason']}")}  # fmt: skip
    if job["status"] in looks and job["completedAt"]:
        found.append(_step(job["completedAt"], *looks[job["status"]], ""))
    elif job["status"] == "pending":
        hold = f"held: {HOLDS.get(job['hold'], job['hold'])}" if job["hold"] else ""
        found.append(_step(job["runAt"], "retry" if ended else "wait", "Waits until then", hold))
    return found


def _began(
    job: dict[str, Any], number: int, at: str, node: str | None, before: str | None, nodes: dict[str, str]
) -> dict[str, Any]:  # fmt: skip
    """The start of an attempt: where, and how late it was, or how long it had waited since the last one."""
    said = [f"on {nodes.get(node, node)}"] if node else []
    if before is not None:
        waited = (instant(_z(at)) - instant(_z(before))).total_seconds()
        said.append(f"{span(round(waited) if waited >= 10 else max(0.0, round(waited, 1)))} after the last")
    elif number == job["attemptNumber"] == 1 and job["status"] != "pending":
        said.append(f"lag {lag(job)}")
    return _step(at, "run", f"Attempt {number} began", ", ".join(said))


def _z(at: str) -> str:
    return at.replace("+00:00", "Z")


def _step(at: str, look: str, what: str, more: str) -> dict[str, Any]:
    return {"at": _z(at), "look": look, "what": what, "more": more}
