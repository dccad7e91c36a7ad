"""Pages of targets, secret names, tenants and nodes, and the search."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from fastapi import APIRouter, Response

from timebell.client.validation import parse_uuid
from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.fields import parse_json
from timebell.dashboard.pages import pages_of
from timebell.dashboard.rendering import format_seconds, navigation, to_datetime
from timebell.dashboard.views import CurrentView, PageRoute, View
from timebell.model.billing_months import month_start
from timebell.store.audit import overview as rows
from timebell.store.cluster import rewinds

MAX_HITS_PER_KIND = 8
# Word of a filter, parameter of the API and label of the fields that the search looks up.
JOB_FIELDS = (
    ("topic", "topic", "topic"), ("owner", "ownerId", "owner"), ("request", "clientRequestId", "client request id"),
)  # fmt: skip
LOSSES_PERIOD = timedelta(days=30)
routes = APIRouter(route_class=PageRoute)


@routes.get("/ui/targets")
async def targets(view: CurrentView, cursor: str = "") -> Response:
    """List named targets and, for users who may read them, the names of secrets."""
    page = await view.get("/targets", limit=50, cursor=cursor)
    secrets = await view.call_api("GET", "/secrets", limit=200)
    return view.render("targets", page=page, secrets=None if secrets.is_error else secrets.body["items"])


@routes.post("/ui/targets/{name}/enable")
async def enable(name: str, view: CurrentView) -> Response:
    """Re-enable a disabled target."""
    await view.change("POST", f"/targets/{quote_segment(name)}/enable")
    return view.redirect("/ui/targets", "enabled")


@routes.post("/ui/targets/{name}/test")
async def send_test(name: str, view: CurrentView) -> Response:
    """Send a test message to a target and show the response."""
    payload = parse_json("payload", view.form.get("payload", ""))
    body = None if payload is None else {"payload": payload}
    result = await view.change("POST", f"/targets/{quote_segment(name)}/test", body)
    return view.render("target_test", name=name, result=result, form=view.form)


@routes.get("/ui/tenants")
async def tenants(view: CurrentView, cursor: str = "") -> Response:
    """List tenants with their usage and limits."""
    page = await view.get("/tenants", limit=50, cursor=cursor)
    responses = [
        await view.call_api("GET", f"/tenants/{quote_segment(tenant['id'])}/usage") for tenant in page["items"]
    ]  # fmt: skip
    usages = [response.body for response in responses if not response.is_error]  # an id with a slash has no usage URL
    month_starts = {
        usage["tenantId"]: month_start(view.now, usage["month"]["timezone"])
        for usage in usages if usage["month"]["limit"]
    }  # fmt: skip
    quota_skips = await view.app.store.run(rows.count_quota_skips, month_starts) if month_starts else {}
    return view.render("tenants", page=page, usages=usages, quota_skips=quota_skips)


@routes.get("/ui/nodes")
async def nodes(view: CurrentView) -> Response:
    """List nodes, writes that the database lost, and the history of leaders."""
    cluster = await view.get("/nodes")
    tzdata_releases = sorted({node["tzdata"] for node in cluster["items"] if node["alive"]})
    steps = leadership_timeline(cluster["leaderships"])
    losses = await view.app.store.run(rewinds.list_rewinds, view.now - LOSSES_PERIOD)
    return view.render("nodes", cluster=cluster, tzdata_releases=tzdata_releases, steps=steps, losses=losses[:20])


def leadership_timeline(leaderships: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps of the leader history, newest first: leases acquired and released, times without a leader."""
    steps: list[dict[str, Any]] = []
    for n, leadership in enumerate(leaderships):
        previous = leaderships[n + 1] if n + 1 < len(leaderships) else None
        gap = None
        if previous is not None and previous["endedAt"]:
            gap = _seconds_between(previous["endedAt"], leadership["acquiredAt"])
        title, detail = f"{leadership['node']} acquired the lease", f"fence {leadership['fence']}"
        steps.append({"at": leadership["acquiredAt"], "style": "ok", "title": title, "detail": detail})
        if gap is not None and previous is not None and not previous["resigned"]:
            steps.append({
                "at": previous["endedAt"], "style": "missed", "title": f"No leader for {format_seconds(gap)}",
                "detail": f"{previous['node']} stopped sending heartbeats",
            })  # fmt: skip
        elif previous is not None and previous["resigned"]:
            detail = f"no leader for {format_seconds(gap)}" if gap else "no gap"
            steps.append({"at": previous["endedAt"], "style": "", "title": f"{previous['node']} resigned",
                          "detail": detail})  # fmt: skip
    if leaderships and leaderships[0]["endedAt"]:
        latest = leaderships[0]
        steps.insert(0, {"at": latest["endedAt"], "style": "missed", "title": f"{latest['node']} stopped leading",
                         "detail": "no leader since"})  # fmt: skip
    return steps


def _seconds_between(start: str, end: str) -> int:
    return max(0, round((to_datetime(end) - to_datetime(start)).total_seconds()))


@routes.post("/ui/nodes/{id}/drain")
async def drain(id: str, view: CurrentView) -> Response:
    """Drain a node: it finishes its running jobs and stops."""
    await view.change("POST", f"/nodes/{quote_segment(id)}/drain")
    return view.redirect("/ui/nodes", "draining")


@routes.get("/ui/search")
async def search(view: CurrentView, q: str = "") -> Response:
    """Search schedules and objects of features by a part of the name, jobs by id or a field, and pages."""
    q = q.strip()
    hits = await _find_jobs(view, q) if q else []
    if q:
        schedules = (await view.get("/schedules", contains=q, limit=MAX_HITS_PER_KIND))["items"]
        hits += [(each["name"], f"/ui/schedules/{quote_segment(each['id'])}", "schedule") for each in schedules]
        for pages in pages_of(view.app.features).values():
            if pages.search is not None:
                hits += (await pages.search(view, q))[: MAX_HITS_PER_KIND // 2]
    entries = [each for each in navigation(view.app.features) if view.may(each.role)]
    hits += [(each.label, each.url, "page") for each in entries if q.lower() in each.label.lower()]
    return view.render("search", hits=hits[: 2 * MAX_HITS_PER_KIND], q=q)


async def _find_jobs(view: View, q: str) -> list[tuple[str, str, str]]:
    """Return a job with this id, and lists of jobs with this value of a field that has an index, if there are any."""
    if parse_uuid(q) is not None:
        response = await view.call_api("GET", f"/jobs/{quote_segment(q)}")
        return [] if response.is_error else [(response.body["topic"], f"/ui/jobs/{quote_segment(q)}", "job")]
    hits = []
    for word, parameter, label in JOB_FIELDS:
        query: dict[str, Any] = {parameter: q}
        response = await view.call_api("GET", "/jobs", limit=1, **query)
        if not response.is_error and response.body["items"]:
            value = f'"{q}"' if " " in q else q
            hits.append((f"Jobs with {label} {q}", f"/ui/jobs?q={quote_segment(f'{word}:{value}')}", "jobs"))
    return hits


@routes.get("/ui/{rest:path}")
async def page_not_found(rest: str, view: CurrentView) -> Response:
    """Render the error page of an unknown path."""
    problem = {"detail": "There is no such page.", "code": "NOT_FOUND", "fix": "Use the navigation."}
    return view.render("error", 404, problem=problem, status=404, request_id=view.request.state.id)
