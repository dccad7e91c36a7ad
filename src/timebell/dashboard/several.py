"""Several schedules at once: first how many those are and why, then each by itself; who is refused is named."""

from __future__ import annotations

from fastapi import APIRouter, Response

from timebell.client.jobs import uuid_of
from timebell.dashboard.inside import part
from timebell.dashboard.views import Page, See, View
from timebell.errors import InvalidInput

DONE = {"pause": "Paused", "resume": "Resumed", "delete": "Deleted"}
MARK = "one-"  # before the id of each that was chosen; its value is the revision that was looked at
NAMED = 12
routes = APIRouter(route_class=Page)


@routes.post("/ui/schedules/several")
async def several(view: See) -> Response:
    """Ask, then do it. Raises InvalidInput (NOTHING_CHOSEN)."""
    what = view.form.get("what", "")
    chosen = {
        name.removeprefix(MARK): revision for name, revision in view.form.items()
        if name.startswith(MARK) and uuid_of(name.removeprefix(MARK)) is not None
    }  # fmt: skip
    if what not in DONE or not chosen:
        raise InvalidInput("No schedule is chosen.", code="NOTHING_CHOSEN", fix="Tick those that are meant.")
    if "sure" not in view.form:
        names = [(await view.get(f"/schedules/{part(id_)}"))["name"] for id_ in list(chosen)[:NAMED]]
        return view.page("several", what=what, chosen=chosen, names=names, told=None, refused=[])
    refused = []
    for id_, revision in chosen.items():
        if (why := await _do(view, what, id_, revision)) is not None:
            refused.append((id_, why))
    if refused:
        return view.page("several", 409, what=what, chosen=chosen, names=[], told=DONE[what], refused=refused)
    return view.back("/ui/schedules", f"several-{what}")


async def _do(view: View, what: str, id_: str, revision: str) -> str | None:
    """Do it to one; why not, where it is refused."""
    path = f"/schedules/{part(id_)}"
    if what == "delete":
        answer = await view.ask("DELETE", path, headers={"if-match": f'"{revision}"'})
    else:
        reason = view.form.get("reason", "").strip()
        body = {"reason": reason} if what == "pause" and reason else {}
        answer = await view.ask("POST", f"{path}/{what}", body)
    return str(answer.body.get("detail", "")) if answer.refused else None
