"""Every page, and the files they are made of."""

from __future__ import annotations

from mimetypes import guess_type

from fastapi import APIRouter, Response
from starlette.exceptions import HTTPException

from timebell.dashboard import (
    admin_pages,
    audit_pages,
    bulk_actions,
    campaign_form,
    campaigns,
    dead_letters,
    exports,
    jobs,
    overview,
    schedule_form,
    schedules,
    sign_in,
    trigger_form,
    triggers,
)
from timebell.dashboard.rendering import STATIC, templates
from timebell.dashboard.views import HEADERS

PAGES = (
    sign_in, overview, schedule_form, bulk_actions, exports, schedules, jobs, dead_letters, campaign_form, campaigns,
    trigger_form, triggers, audit_pages, admin_pages,
)  # fmt: skip
# Now, and not when the first page is asked for: an engine runs beside.
for each_name in templates().list_templates():
    templates().get_template(each_name)
KINDS = (".css", ".js", ".woff2", ".txt")
routes = APIRouter(include_in_schema=False)


@routes.get("/ui/static/{name:path}")
async def static(name: str, v: str = "") -> Response:
    """A file of ours. Its address changes when it does, so browsers keep it."""
    try:
        path = (STATIC / name).resolve()
        there = path.is_relative_to(STATIC) and path.suffix in KINDS and path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        there = False
    if not there:
        raise HTTPException(404, "There is no such file")
    kind = guess_type(path.name)[0] or "application/octet-stream"
    kept = "public, max-age=31536000, immutable" if v else "public, max-age=60"
    return Response(path.read_bytes(), media_type=kind, headers={**HEADERS, "Cache-Control": kept})


# After what is above: the last of them has an answer for every path.
for each in PAGES:
    routes.include_router(each.routes)
