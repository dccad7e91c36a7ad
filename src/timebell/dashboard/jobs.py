"""Pages of jobs: the filtered list, one job as a timeline, retry and cancel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse

from timebell.api.job_fields import render_job
from timebell.api.schemas import format_utc
from timebell.client.validation import parse_uuid
from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.dead_letters import CANCEL_FIELDS, FILTER_FIELDS
from timebell.dashboard.fields import to_problem
from timebell.dashboard.job_timeline import attempts_allowed, explain_state, timeline_steps
from timebell.dashboard.rendering import format_json
from timebell.dashboard.time_range import TimeRange, read_time_range
from timebell.dashboard.views import CurrentView, PageRoute, View
from timebell.durations import parse_duration
from timebell.errors import InvalidInput
from timebell.model.job import STATE_WORDS
from timebell.model.payload import read_json
from timebell.store.audit import overview as rows
from timebell.tenancy.roles import Role, require

# Tabs of the list: label -> filter expression.
TABS = {
    "All": "", "Pending": "status:pending", "Retrying": "status:retrying", "Held": "status:held",
    "Running": "status:running", "Failed": "status:failed", "Completed": "status:completed",
    "Skipped": "status:skipped", "Cancelled": "status:cancelled",
}  # fmt: skip
# With these filters, an index has the failed jobs by the time of their failure.
FAILED_FILTERS = {"status", "topic", "scheduleId", "from", "to"}
LAG_FILTERS = {"status", "topic", "ownerId", "scheduleId", "key", "queue", "minAttempts", "lag"}
# Name in a filter expression -> query parameter of the API.
FILTER_PARAMETERS = {
    "status": "status", "topic": "topic", "owner": "ownerId", "schedule": "scheduleId", "key": "key", "queue": "queue",
    "attempts": "minAttempts", "lag": "lag", "from": "from", "to": "to", "correlation": "correlationId",
    "request": "clientRequestId", "metadata": "metadata", "payload": "payload", "error": "error",
}  # fmt: skip
FILTER_COLUMNS = {"topic": "topic", "ownerId": "owner_id", "scheduleId": "schedule_id", "key": "key", "queue": "queue"}
routes = APIRouter(route_class=PageRoute)


@routes.get("/ui/jobs")
async def jobs(view: CurrentView, q: str = "", sort: str = "", cursor: str = "") -> Response:
    """List jobs, filtered by expressions such as `status:failed topic:erp.sync attempts:2`, within a time range."""
    if (id_ := parse_uuid(q.strip())) is not None:
        return RedirectResponse(f"/ui/jobs/{id_}", 303)
    filters, problem = await parse_filter(view, q)
    if problem is None and filters.keys() & {"from", "to"}:
        return RedirectResponse(f"/ui/jobs?{urlencode(_split_range(q))}", 303)
    time_range = read_time_range(view)
    filters, problem = (
        filters | time_range.parameters,
        problem or time_range.problem or _lag_problem(filters, time_range),
    )
    is_lag_search = problem is None and "lag" in filters
    time_order = _time_order(filters)
    status = 422
    page: dict[str, Any] = {"items": [], "nextCursor": None}
    if is_lag_search:
        page["items"] = await _find_late_jobs(view, filters)
    elif problem is None:
        path, query = "/jobs", filters
        if time_order == "failure" and sort != "created":
            path, query = "/dead-letters", {name: text for name, text in filters.items() if name != "status"}
        elif time_order == "due time" and sort != "created":
            query = filters | {"sort": "runAt"}
        response = await view.call_api("GET", path, limit=50, cursor=cursor, **query)
        if response.is_error:
            problem, status = response.body, response.status
        else:
            page = response.body
    words = q.split()
    tenant_id = view.caller.tenant_id
    ids = {job["scheduleId"] for job in page["items"] if job["scheduleId"]}
    names = await view.app.store.run(rows.get_schedule_names, tenant_id, ids) if ids else {}
    return view.render(
        "jobs", 200 if problem is None else status, page=page, schedule_names=names, q=q, problem=problem,
        time_range=time_range, tabs=TABS, counts=view.overview_cache.counts(tenant_id),
        current_tab=" ".join(word for word in words if word.startswith("status:")),
        other_filters=" ".join(word for word in words if not word.startswith("status:")),
        filter_names=FILTER_PARAMETERS, is_lag_search=is_lag_search, explain_state=explain_state,
        attempts_allowed=attempts_allowed, sort=sort, time_order=time_order, cursor=cursor,
        matching_action=_matching_action(filters) if page["nextCursor"] or cursor else None,
    )  # fmt: skip


def _time_order(filters: Mapping[str, Any]) -> str:
    """Return the order by time that jobs with these filters have; empty: only that by creation."""
    if filters.get("status") == "failed" and filters.keys() <= FAILED_FILTERS and "*" not in filters.get("topic", ""):
        return "failure"
    return "due time" if filters.get("status") == "pending" and filters.keys() <= {"status", "queue"} else ""


def _split_range(q: str) -> dict[str, str]:
    """Return the query of the page for a filter expression that contains `from:` or `to:`."""
    words = _split_words(q, keep_quotes=True)
    ends = dict(word.replace('"', "").split(":", 1) for word in words if word.startswith(("from:", "to:")))
    return {"q": " ".join(word for word in words if not word.startswith(("from:", "to:"))), **ends}


def _lag_problem(filters: Mapping[str, Any], time_range: TimeRange) -> dict[str, Any] | None:
    """Return the problem of a search by lag with filters that it does not have."""
    if "lag" not in filters or not (filters.keys() - LAG_FILTERS or time_range.parameters):
        return None
    return {
        "detail": "A lag cannot be combined with these filters or a period.", "code": "INVALID_FILTER",
        "fix": "Use status, topic, owner, schedule, key, queue or attempts with lag.",
    }  # fmt: skip


async def parse_filter(view: View, q: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Parse a filter expression; returns the query parameters and None, or an empty dict and a problem.

    The lag is in seconds, and not a parameter of the API. A word without a colon is a topic. Values with spaces are
    quoted: `error:"bank is away"`. A time is a duration before now, such as `24h`, or RFC 3339.
    """
    filters: dict[str, Any] = {}
    for word in _split_words(q):
        name, colon, value = word.partition(":")
        if not colon:
            name, value = "topic", word
        if name not in FILTER_PARAMETERS or not value:
            known = ", ".join(f"{each}:" for each in FILTER_PARAMETERS)
            return {}, {"detail": f"{word!r:.60} is not a filter.", "fix": f"Use {known} or a topic.",
                        "code": "INVALID_FILTER"}  # fmt: skip
        if name == "schedule" and parse_uuid(value) is None:
            matches = (await view.get("/schedules", name=value, limit=1))["items"]
            if not matches:
                return {}, {"detail": f"There is no schedule {value!r:.60}.", "fix": "Specify its name or id.",
                            "code": "SCHEDULE_NOT_FOUND"}  # fmt: skip
            value = matches[0]["id"]
        if name in ("from", "to") and (ago := parse_duration(value)) is not None:
            value = str(format_utc(view.now - timedelta(seconds=min(ago, 1e9))))
        if name in ("metadata", "payload"):
            filters.setdefault(name, []).append(value)
            continue
        filters[FILTER_PARAMETERS[name]] = value.lstrip(">=") if name in ("attempts", "lag") else value
        if name == "lag":
            filters["lag"] = parse_duration(filters["lag"])
            if filters["lag"] is None:
                return {}, {"detail": f"{word!r:.60} is not a lag.", "fix": "E.g. lag:>5s or lag:>200ms.",
                            "code": "INVALID_FILTER"}  # fmt: skip
    return filters, None


def _matching_action(filters: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]] | None:
    """Return the action for all jobs that match a filter: its label, URL and fields; None if there is none."""
    fields = {name: value for name, value in filters.items() if name != "status"}
    if filters.get("status") == "failed" and fields.keys() <= set(FILTER_FIELDS):
        return "Retry all matching…", "/ui/dead-letters/retry", fields
    if fields and filters.get("status", "pending") in ("pending", "active") and fields.keys() <= set(CANCEL_FIELDS):
        return "Cancel all matching…", "/ui/jobs/cancel", fields
    return None


def _split_words(q: str, *, keep_quotes: bool = False) -> list[str]:
    """Split at spaces outside of double quotes, which are removed by default."""
    words = re.findall(r'(?:[^\s"]|"[^"]*"?)+', q)
    return words if keep_quotes else [word.replace('"', "") for word in words]


async def _find_late_jobs(view: View, filters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the latest late starts among running jobs and jobs finished within an hour.

    Raises InvalidInput (INVALID_STATUS).
    """
    columns = {FILTER_COLUMNS[name]: value for name, value in filters.items() if name in FILTER_COLUMNS}
    if status := filters.get("status"):
        if status not in STATE_WORDS:
            raise InvalidInput(
                f"There is no status {status!r:.40}.", code="INVALID_STATUS", fix=f"Use {', '.join(STATE_WORDS)}."
            )
        columns["state"] = {state.value for state in STATE_WORDS[status]}
    if "schedule_id" in columns:
        columns["schedule_id"] = parse_uuid(columns["schedule_id"])
    if (min_attempts := filters.get("minAttempts", "")).isdecimal():
        columns["attempt"] = int(min_attempts[:9])
    min_lag = timedelta(seconds=min(filters["lag"], 1e9))
    late_jobs = await view.app.store.run(rows.list_late_starts, view.caller.tenant_id, view.now, min_lag, columns)
    return [render_job(job) for job in late_jobs]


@routes.get("/ui/jobs/{id}")
async def job(id: str, view: CurrentView) -> Response:
    """Show one job as a timeline."""
    job_ = await view.get(f"/jobs/{quote_segment(id)}")
    schedule_name = None
    if job_["scheduleId"]:
        response = await view.call_api("GET", f"/schedules/{quote_segment(job_['scheduleId'])}")
        schedule_name = None if response.is_error else response.body["name"]
    cluster = await view.get("/nodes")
    node_names = {node["id"]: node["name"] for node in (*cluster["items"], *cluster["workers"])}
    steps = timeline_steps(job_, node_names, view.now)
    return view.render("job", job=job_, schedule_name=schedule_name, steps=steps, node_names=node_names)


@routes.get("/ui/jobs/{id}/progress")
async def progress(id: str, view: CurrentView) -> Response:
    """Render the progress of a job, for its page."""
    return view.render("job_progress", job=await view.get(f"/jobs/{quote_segment(id)}"))


@routes.post("/ui/jobs/{id}/retry")
async def retry(id: str, view: CurrentView) -> Response:
    """Retry a failed job."""
    await view.change("POST", f"/jobs/{quote_segment(id)}/retry")
    return view.redirect(f"/ui/jobs/{quote_segment(id)}", "retried")


@routes.get("/ui/jobs/{id}/edit")
async def edit(id: str, view: CurrentView) -> Response:
    """Render the payload of a failed job as a form. Raises Refused (ROLE_TOO_LOW)."""
    require(view.caller.role, Role.EDITOR)
    job_ = await view.get(f"/jobs/{quote_segment(id)}")
    return view.render("job_edit", job=job_, text=format_json(job_["payload"]), problem=None)


@routes.post("/ui/jobs/{id}/edit")
async def retry_edited(id: str, view: CurrentView) -> Response:
    """Replace a failed job by a new one with the payload of the form."""
    job_ = await view.get(f"/jobs/{quote_segment(id)}")
    text = view.form.get("payload", "")
    try:
        payload = read_json(text.encode(errors="replace"), "payload")
    except InvalidInput as error:
        return view.render("job_edit", 422, job=job_, text=text, problem=to_problem(error))
    response = await view.call_api("POST", f"/jobs/{quote_segment(id)}/retry", {"payload": payload})
    if response.is_error:
        return view.render("job_edit", response.status, job=job_, text=text, problem=response.body)
    return view.redirect(f"/ui/jobs/{quote_segment(response.body['id'])}", "edited")


@routes.post("/ui/jobs/{id}/cancel")
async def cancel(id: str, view: CurrentView) -> Response:
    """Cancel a job."""
    await view.change("POST", f"/jobs/{quote_segment(id)}/cancel")
    return view.redirect(f"/ui/jobs/{quote_segment(id)}", "cancelled")
