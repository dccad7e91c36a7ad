"""Triggers: are jobs in step with the data? Where the dates are, in which words each fires, and what scans do."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Response

from timebell.dashboard.api_client import part
from timebell.dashboard.views import Page, See
from timebell.store.campaigns import progress

UNITS = {"s": "s", "m": "min", "h": "h", "d": "days", "w": "weeks"}
SIGNS = {
    "eq": "is", "ne": "is not", "lt": "<", "le": "≤", "gt": ">", "ge": "≥", "in": "is one of",
    "not_in": "is none of", "empty": "is empty", "not_empty": "is not empty",
}  # fmt: skip
SIGN_IN = "re-authorization required"  # what a source says in its fault when its token is of no use any more
DONE = {"pause": "paused", "resume": "resumed", "scan": "scanning"}
routes = APIRouter(route_class=Page)


@routes.get("/ui/triggers")
async def triggers(view: See, cursor: str = "") -> Response:
    """A page of them, the scans that run, and the sources."""
    found = await view.get("/triggers", limit=50, cursor=cursor)
    sources = {one["name"]: one for one in (await view.get("/sources", limit=200))["items"]}
    for name in {one["source"] for one in found["items"]} - sources.keys():
        sources[name] = await view.get(f"/sources/{part(name)}")
    scans = (await view.get("/operations", kind="scan", state="running", limit=50))["items"]
    waiting = await view.app.store.run(progress.planned, [one["id"] for one in found["items"]])
    rows = [
        one | {"home": sources[one["source"]], "waiting": waiting[one["id"]], "words": words(one),
               "look": look(one, sources[one["source"]], scans)}
        for one in found["items"]
    ]  # fmt: skip
    return view.page(
        "triggers", rows=rows, found=found, scans=scans, sources=list(sources.values()), source_look=source_look,
    )  # fmt: skip


@routes.get("/ui/triggers/{name}")
async def trigger(name: str, view: See, cursor: str = "") -> Response:
    """One: its rule, its source, its scans and the items."""
    one = await view.get(f"/triggers/{part(name)}")
    home = await view.get(f"/sources/{part(one['source'])}")
    items = await view.get(f"/sources/{part(one['source'])}/items", limit=25, cursor=cursor)
    listed = (await view.get("/operations", kind="scan", limit=50))["items"]
    scans = [each for each in listed if each["spec"].get("trigger") == one["id"]][:3]
    planned = await view.app.store.run(progress.planned, [one["id"]])
    running = [each for each in scans if each["state"] == "running"]
    home["options"] = {name: bare(value) for name, value in home["options"].items()}
    return view.page(
        "trigger", one=one, home=home, items=items, scans=scans, planned=planned[one["id"]], words=words(one),
        state=look(one, home, running), secrets=secrets_of(home), sign_in=needs_sign_in(home),
    )  # fmt: skip


@routes.post("/ui/triggers/{name}/{verb}")
async def steer(name: str, verb: str, view: See) -> Response:
    """Pause with a reason, resume, or scan."""
    reason = view.form.get("reason", "").strip()
    body = {"reason": reason} if verb == "pause" and reason else None
    await view.send("POST", f"/triggers/{part(name)}/{part(verb)}", body)
    return view.back(f"/ui/triggers/{part(name)}", DONE.get(verb, ""))


def needs_sign_in(home: Mapping[str, Any]) -> bool:
    """Whether the source wants another token."""
    return SIGN_IN in (home["fault"] or "")


def look(one: Mapping[str, Any], home: Mapping[str, Any], scans: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Colour and word for a trigger."""
    if not one["enabled"]:
        return "paused", "Paused"
    if home["orphanedAt"] or home["fault"]:
        return source_look(home)
    if any(each["spec"].get("trigger") == one["id"] for each in scans):
        return "run", "Scanning"
    return "ok", "In step"


def source_look(home: Mapping[str, Any]) -> tuple[str, str]:
    """Colour and word for a source."""
    if needs_sign_in(home):
        return "retry", "Sign in again"
    if home["orphanedAt"]:
        return "bad", "Orphaned"
    return ("bad", "Cannot be read") if home["fault"] else ("ok", "In step")


def secrets_of(home: Mapping[str, Any]) -> list[str]:
    """The names of the secrets that a source uses."""
    return [value["secret"] for value in home["options"].values() if isinstance(value, dict) and "secret" in value]


def bare(value: Any) -> Any:
    """An option without the password that a URL may have in it."""
    return re.sub(r"(?<=://)[^/@\s]*@", "…@", value) if isinstance(value, str) else value


def words(one: Mapping[str, Any]) -> list[tuple[str, str]]:
    """When it fires, as (text, code) in turn: 15 min before `start_at`, for each in `users`, if `status` is active."""
    steps = [_offset(each) for each in one["offsets"]]
    said = [(f"{' and '.join(steps)} ", one["column"])]
    if one["recipients"]:
        said.append((", for each in ", one["recipients"]))
    for n, each in enumerate(one["condition"]):
        value = each.get("value")
        said.append((" and " if n else ", if ", each["field"]))
        said.append(
            (
                f" {SIGNS.get(each['op'], each['op'])} ",
                "" if value is None else value if isinstance(value, str) else json.dumps(value),
            )
        )
    if one["unless"]:
        said.append((", unless ", one["unless"]))
    if one["timezone"]:
        said.append((", local times of ", one["timezone"]))
    return said


def _offset(text: str) -> str:
    found = re.fullmatch(r"([+-])(\d+)([smhdw])", text)
    if found is None:
        return "at"
    unit = UNITS[found[3]].rstrip("s" if found[2] == "1" and len(UNITS[found[3]]) > 1 else "")
    return f"{found[2]} {unit} {'before' if found[1] == '-' else 'after'}"
