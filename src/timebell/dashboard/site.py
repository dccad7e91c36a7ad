"""Routes of all pages and of the static files."""

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
from timebell.dashboard.rendering import STATIC_DIR, template_environment
from timebell.dashboard.views import SECURITY_HEADERS

PAGE_MODULES = (
    sign_in, overview, schedule_form, bulk_actions, exports, schedules, jobs, dead_letters, campaign_form, campaigns,
    trigger_form, triggers, audit_pages, admin_pages,
)  # fmt: skip
# Compile all templates at import: compiling them in the first request would block the event loop of a running engine.
for template_name in template_environment().list_templates():
    template_environment().get_template(template_name)
STATIC_SUFFIXES = (".css", ".js", ".woff2", ".txt")
routes = APIRouter(include_in_schema=False)


@routes.get("/ui/static/{name:path}")
async def static_file(name: str, v: str = "") -> Response:
    """Serve a static file. Its URL contains a digest (`v`), so browsers may cache it forever."""
    try:
        path = (STATIC_DIR / name).resolve()
        exists = path.is_relative_to(STATIC_DIR) and path.suffix in STATIC_SUFFIXES and path.is_file()
    except (OSError, ValueError):  # not a valid file name
        exists = False
    if not exists:
        raise HTTPException(404, "No such file")
    media_type = guess_type(path.name)[0] or "application/octet-stream"
    cache_control = "public, max-age=31536000, immutable" if v else "public, max-age=60"
    headers = {**SECURITY_HEADERS, "Cache-Control": cache_control}
    return Response(path.read_bytes(), media_type=media_type, headers=headers)


# Registered after the static files: the last module has a route that matches every path.
for page_module in PAGE_MODULES:
    routes.include_router(page_module.routes)
