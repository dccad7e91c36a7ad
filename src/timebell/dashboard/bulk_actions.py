"""Several schedules or jobs at once: first how many those are and why, then each by itself; who is refused is named."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Response

from timebell.client.validation import uuid_of
from timebell.dashboard.api_client import part
from timebell.dashboard.views import Page, See, View
from timebell.errors import InvalidInput

DONE = {
    "schedules": {"pause": "Paused", "resume": "Resumed", "delete": "Deleted"},
    "jobs": {"cancel": "Cancelled", "retry": "Retried"},
}
NAME = {"schedules": "name", "jobs": "topic"}
MARK = "one-"  # before the id of each that was chosen; its value is the revision that was looked at
NAMED = 12
routes = APIRouter(route_class=Page)


@routes.post("/ui/schedules/several")
async def several_schedules(view: See) -> Response:
    """Pause, resume or delete them. Raises InvalidInput (NOTHING_CHOSEN)."""
    return await _several(view, "schedules", "/ui/schedules")


@routes.post("/ui/jobs/several")
async def several_jobs(view: See) -> Response:
    """Cancel or retry them, and go back to the list as it was. Raises InvalidInput (NOTHING_CHOSEN)."""
    q = view.form.get("q", "")
    return await _several(view, "jobs", f"/ui/jobs?q={quote(q, safe='')}" if q else "/ui/jobs")


async def _several(view: View, of: str, back: str) -> Response:
    what = view.form.get("what", "")
    chosen = {
        name.removeprefix(MARK): revision for name, revision in view.form.items()
        if name.startswith(MARK) and uuid_of(name.removeprefix(MARK)) is not None
    }  # fmt: skip
    if what not in DONE[of] or not chosen:
        raise InvalidInput(
            f"No {of.removesuffix('s')} is chosen.", code="NOTHING_CHOSEN", fix="Tick those that are meant."
        )
    facts: dict[str, Any] = {"what": what, "chosen": chosen, "of": of, "back": back, "told": None, "refused": []}
    if "sure" not in view.form:
        names = [(await view.get(f"/{of}/{part(id_)}"))[NAME[of]] for id_ in list(chosen)[:NAMED]]
        return view.page("several", names=names, **facts)
    for id_, revision in chosen.items():
        if (why := await _do(view, of, what, id_, revision)) is not None:
            facts["refused"].append((id_, why))
    if facts["refused"]:
        return view.page("several", 409, names=[], **facts | {"told": DONE[of][what]})
    return view.back(back, f"several-{what}")


async def _do(view: View, of: str, what: str, id_: str, revision: str) -> str | None:
    """Do it to one; why not, where that is so."""
    path = f"/{of}/{part(id_)}"
    if what == "delete":
        answer = await view.ask("DELETE", path, headers={"if-match": f'"{revision}"'})
    else:
        reason = view.form.get("reason", "").strip()
        body = {"reason": reason} if what == "pause" and reason else {}
        answer = await view.ask("POST", f"{path}/{what}", body if of == "schedules" else None)
    if answer.refused:
        return str(answer.body.get("detail", ""))
    if what == "cancel" and answer.body["outcome"] == "already_done":
        return f"It is {answer.body['job']['status']} already."
    return None
