"""Where things are: targets and secrets (by name alone), tenants and what they use, nodes; and the search."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from timebell.client.validation import uuid_of
from timebell.dashboard.api_client import part
from timebell.dashboard.rendering import NAV, instant, span
from timebell.dashboard.views import Page, See
from timebell.model.billing_months import first_of
from timebell.store.audit import overview as rows

FEW = 8
routes = APIRouter(route_class=Page)


@routes.get("/ui/targets")
async def targets(view: See, cursor: str = "") -> Response:
    """Where jobs go under a name, and the names of secrets."""
    found = await view.get("/targets", limit=50, cursor=cursor)
    secrets = await view.ask("GET", "/secrets", limit=200)
    return view.page("targets", found=found, secrets=None if secrets.refused else secrets.body["items"])


@routes.post("/ui/targets/{name}/enable")
async def enable(name: str, view: See) -> Response:
    """Send to it again."""
    await view.send("POST", f"/targets/{part(name)}/enable")
    return view.back("/ui/targets", "enabled")


@routes.post("/ui/targets/{name}/test")
async def test(name: str, view: See) -> Response:
    """Send one message to it, and show what came back."""
    return view.page("target_test", name=name, told=await view.send("POST", f"/targets/{part(name)}/test"))


@routes.get("/ui/tenants")
async def tenants(view: See, cursor: str = "") -> Response:
    """Who uses how much of what they may."""
    found = await view.get("/tenants", limit=50, cursor=cursor)
    asked = [await view.ask("GET", f"/tenants/{part(one['id'])}/usage") for one in found["items"]]
    used = [each.body for each in asked if not each.refused]  # no URL leads to one with a / in its name
    began = {
        each["tenantId"]: first_of(view.now, each["month"]["timezone"]) for each in used if each["month"]["limit"]
    }  # fmt: skip
    skipped = await view.app.store.run(rows.skipped_by_quota, began) if began else {}
    return view.page("tenants", found=found, used=used, skipped=skipped)


@routes.get("/ui/nodes")
async def nodes(view: See) -> Response:
    """Which processes run, and which one leads."""
    found = await view.get("/nodes")
    releases = sorted({one["tzdata"] for one in found["items"] if one["alive"]})
    return view.page("nodes", found=found, releases=releases, story=leadership(found["leaderships"]))


def leadership(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Who took the lease when, and where nobody had it, newest first."""
    told: list[dict[str, Any]] = []
    for n, one in enumerate(found):
        before = found[n + 1] if n + 1 < len(found) else None
        gap = None if before is None or not before["endedAt"] else _between(before["endedAt"], one["takenAt"])
        told.append({"at": one["takenAt"], "look": "ok", "what": f"{one['node']} took the lease",
                     "more": f"fence {one['fence']}"})  # fmt: skip
        if gap is not None and before is not None and not before["resigned"]:
            told.append({
                "at": before["endedAt"], "look": "missed", "what": f"No leader for {span(gap)}",
                "more": f"{before['node']} was not heard from any more",
            })  # fmt: skip
        elif before is not None and before["resigned"]:
            later = f"; nobody led for {span(gap)}" if gap else "; no gap"
            told.append({"at": before["endedAt"], "look": "", "what": f"{before['node']} left", "more": later[2:]})
    if found and found[0]["endedAt"]:
        told.insert(0, {"at": found[0]["endedAt"], "look": "missed", "what": f"{found[0]['node']} left",
                        "more": "nobody has led since"})  # fmt: skip
    return told


def _between(start: str, end: str) -> int:
    return max(0, round((instant(end) - instant(start)).total_seconds()))


@routes.post("/ui/nodes/{id}/drain")
async def drain(id: str, view: See) -> Response:
    """Let it finish what it runs, and leave."""
    await view.send("POST", f"/nodes/{part(id)}/drain")
    return view.back("/ui/nodes", "draining")


@routes.get("/ui/search")
async def search(view: See, q: str = "") -> Response:
    """Schedules, campaigns and triggers by part of their name, a job by its id, topics, pages."""
    q = q.strip()
    hits = []
    if uuid_of(q) is not None:
        answer = await view.ask("GET", f"/jobs/{part(q)}")
        hits += [] if answer.refused else [(answer.body["topic"], f"/ui/jobs/{part(q)}", "job")]
    if q:
        found = await view.get("/schedules", contains=q, limit=FEW)
        hits += [(one["name"], f"/ui/schedules/{part(one['id'])}", "schedule") for one in found["items"]]
        for what, kind in (("campaigns", "campaign"), ("triggers", "trigger")):
            newest = (await view.get(f"/{what}", limit=200))["items"]
            named = [(one["name"], one["id"] if what == "campaigns" else one["name"]) for one in newest]
            hits += [
                (name, f"/ui/{what}/{part(id_)}", kind) for name, id_ in named if name and q.lower() in name.lower()
            ][: FEW // 2]
        hits.append((f"Jobs of the topic {q}", f"/ui/jobs?q=topic:{part(q)}", "jobs"))
    hits += [(label, url, "page") for _, url, label, role, _ in NAV if q.lower() in label.lower() and view.may(role)]
    return view.page("search", hits=hits[: 2 * FEW], q=q)


@routes.get("/ui/{rest:path}")
async def nowhere(rest: str, view: See) -> Response:
    """There is no such page."""
    problem = {"detail": "There is no such page.", "code": "NOT_FOUND", "fix": "The navigation has all there are."}
    return view.page("trouble", 404, problem=problem, status=404, id=view.request.state.id)
