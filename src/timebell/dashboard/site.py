"""Routes of all pages and of the static files."""

from __future__ import annotations

from functools import cache
from mimetypes import guess_type

from fastapi import APIRouter, Response
from starlette.exceptions import HTTPException

from timebell.dashboard import (
    account_pages,
    admin_pages,
    audit_log_pages,
    audit_pages,
    bulk_actions,
    dead_letters,
    exports,
    jobs,
    key_pages,
    overview,
    provider_sign_in,
    schedule_form,
    schedules,
    sign_in,
    target_form,
    user_pages,
)
from timebell.dashboard.pages import pages_of
from timebell.dashboard.rendering import STATIC_DIR, template_environment
from timebell.dashboard.views import SECURITY_HEADERS
from timebell.feature import Feature

PAGE_MODULES = (
    sign_in, provider_sign_in, overview, schedule_form, bulk_actions, exports, schedules, jobs, dead_letters,
    audit_pages, audit_log_pages, target_form, user_pages, key_pages, account_pages,
)  # fmt: skip
STATIC_SUFFIXES = (".css", ".js", ".woff2", ".txt")
static_routes = APIRouter()


@static_routes.get("/ui/static/{name:path}")
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


@cache
def build_routes(features: tuple[Feature, ...]) -> APIRouter:
    """Return the routes of all pages, with those of the features."""
    # Compile all templates now: compiling them in the first request would block the event loop of a running engine.
    environment = template_environment(features)
    for template_name in environment.list_templates():
        environment.get_template(template_name)
    combined = APIRouter(include_in_schema=False)
    of_features = [router for pages in pages_of(features).values() for router in pages.routers]
    # The last one has a route that matches every path.
    for router in (
        static_routes, *(module.routes for module in PAGE_MODULES), *of_features, admin_pages.routes,
    ):  # fmt: skip
        combined.include_router(router)
    return combined
