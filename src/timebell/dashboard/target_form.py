"""Forms that create and edit an http target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Response

from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.fields import format_value, locate_problem, parse_json, parse_number, text_fields, to_problem
from timebell.dashboard.views import CurrentView, PageRoute, View
from timebell.errors import InvalidInput
from timebell.model.target import referenced_secret

METHODS = ("POST", "GET", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
BODIES = (
    ("", "Default of the method"), ("none", "None"), ("json", "Payload as JSON"), ("template", "JSON template"),
    ("text", "Text"), ("form", "Form"), ("multipart", "Multipart form"), ("cloudevents", "CloudEvent"),
    ("plain", "Event fields"),
)  # fmt: skip
AUTHENTICATIONS = (
    ("", "None"), ("bearer", "Bearer token"), ("basic", "Basic"), ("oauth2", "OAuth 2 client credentials"),
    ("oidc", "OIDC identity token"),
)  # fmt: skip
# The members of `auth` by its type: (member, form field, whether it is the name of a secret).
AUTH_FIELDS = {
    "bearer": (("token", "authSecret", True),),
    "basic": (("username", "authUser", False), ("password", "authSecret", True)),
    "oauth2": (
        ("clientId", "authUser", False), ("clientSecret", "authSecret", True), ("tokenUrl", "tokenUrl", False),
        ("scope", "scope", False),
    ),
    "oidc": (("credentials", "authSecret", True), ("audience", "audience", False)),
}  # fmt: skip
TLS_FIELDS = (("ca", "ca", False), ("certificate", "certificate", False), ("key", "keySecret", True))
PROXY_FIELDS = (
    ("url", "proxyUrl", False), ("username", "proxyUser", False), ("password", "proxySecret", True)
)  # fmt: skip
TEXT_OPTIONS = ("url", "method", "body", "contentType", "timeout")
NUMBER_OPTIONS = ("concurrency", "rate", "perSeconds")
FORM_OPTIONS = (
    *TEXT_OPTIONS, *NUMBER_OPTIONS, "template", "query", "headers", "success", "expect", "followRedirects", "signed",
    "auth", "tls", "proxy",
)  # fmt: skip
"""Options that the form represents. It keeps the others, and the other members of `expect` and `auth`."""
FORM_FIELDS = {"expect": "contains", "tls": "ca", "proxy": "proxyUrl"}
"""Form fields by their options, if they differ."""
routes = APIRouter(route_class=PageRoute)


@routes.get("/ui/targets/new")
async def new(view: CurrentView) -> Response:
    """Render an empty form."""
    return await _render_form(view, {"method": "POST"})


@routes.post("/ui/targets/new")
async def create(view: CurrentView) -> Response:
    """Create a target, and show its signing secret once."""
    name = view.form.get("name", "").strip()
    try:
        options = to_options(view.form, {})
    except InvalidInput as error:
        return await _render_form(view, view.form, to_problem(error), status=422)
    response = await view.call_api("POST", "/targets", {"name": name, "kind": "http", "options": options})
    if response.is_error:
        return await _render_form(view, view.form, response.body, status=response.status)
    return view.render("target_created", target=response.body)


@routes.get("/ui/targets/{name}/edit")
async def edit(name: str, view: CurrentView) -> Response:
    """Render the form of an existing http target."""
    response = view.check_response(await view.call_api("GET", f"/targets/{quote_segment(name)}"))
    form = {**to_form(response.body["options"]), "etag": response.headers["etag"]}
    return await _render_form(view, form, name=name)


@routes.post("/ui/targets/{name}/edit")
async def save(name: str, view: CurrentView) -> Response:
    """Change a target, unless another user has changed it since the form was loaded."""
    path = f"/targets/{quote_segment(name)}"
    target = await view.get(path)
    try:
        options = to_options(view.form, target["options"])
    except InvalidInput as error:
        return await _render_form(view, view.form, to_problem(error), name=name, status=422)
    headers = {"If-Match": view.form.get("etag", "")}
    response = await view.call_api("PUT", path, {"kind": "http", "options": options}, headers=headers)
    if response.is_error:
        return await _render_form(view, view.form, response.body, name=name, status=response.status)
    return view.redirect("/ui/targets", "saved")


async def _render_form(
    view: View, form: Mapping[str, str], problem: Any = None, *, name: str | None = None, status: int = 200
) -> Response:
    secrets = await view.call_api("GET", "/secrets", limit=200)
    names = [] if secrets.is_error else [secret["name"] for secret in secrets.body["items"]]
    # A problem of `url` may concern any of the URLs.
    has_several_urls = form.get("proxyUrl") or form.get("tokenUrl")
    field_names = {**FORM_FIELDS, "url": ""} if has_several_urls else FORM_FIELDS
    return view.render(
        "target_form", status, form=form, problem=locate_problem(problem, form, field_names), name=name,
        methods=[(each, each) for each in METHODS], bodies=BODIES, authentications=AUTHENTICATIONS,
        secrets=[("", "None"), *((each, each) for each in names)],
    )  # fmt: skip


def to_options(form: Mapping[str, str], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Convert form fields to options; those of `stored` that the form does not represent are kept.

    Raises InvalidInput.
    """
    options = {name: value for name, value in stored.items() if name not in FORM_OPTIONS}
    options |= text_fields(form, *TEXT_OPTIONS)
    options |= {
        name: number for name in NUMBER_OPTIONS if (number := parse_number(name, form.get(name, ""))) is not None
    }
    template = form.get("template", "")
    if template.strip():
        options["template"] = template if options.get("body") == "text" else parse_json("template", template)
    headers: dict[str, Any] = _parse_lines("headers", form.get("headers", ""))
    secrets = _parse_lines("secretHeaders", form.get("secretHeaders", ""))
    headers |= {name: {"secret": secret} for name, secret in secrets.items()}
    query = _parse_lines("query", form.get("query", ""))
    lists = {name: value for name, value in stored.get("query", {}).items() if not isinstance(value, str)}
    statuses = [each for each in form.get("success", "").replace(",", " ").split() if each]
    expect = {**stored.get("expect", {}), "contains": form.get("contains", "").strip()}
    options |= {
        name: value
        for name, value in (
            ("headers", headers), ("query", lists | query),
            ("success", [parse_number("success", each) if each.isdigit() else each for each in statuses]),
            ("expect", {member: value for member, value in expect.items() if value}),
            ("followRedirects", form.get("followRedirects") == "1"),
            ("tls", _to_object(form, TLS_FIELDS)), ("proxy", _to_object(form, PROXY_FIELDS)),
            ("auth", _to_auth(form, stored.get("auth", {}))),
        )
        if value
    }  # fmt: skip
    if form.get("signed") == "0":
        options["signed"] = False
    return options


def _to_auth(form: Mapping[str, str], stored: Mapping[str, Any]) -> dict[str, Any]:
    kind = form.get("auth", "")
    if kind not in AUTH_FIELDS:
        return {}
    known = {member for member, _, _ in AUTH_FIELDS[kind]}
    kept = {name: value for name, value in stored.items() if stored.get("type") == kind and name not in known}
    return {**kept, "type": kind, **_to_object(form, AUTH_FIELDS[kind])}


def _to_object(form: Mapping[str, str], fields: tuple[tuple[str, str, bool], ...]) -> dict[str, Any]:
    """Return the members of an option whose form fields are not empty."""
    values = {member: (form.get(field, "").strip(), is_secret) for member, field, is_secret in fields}
    return {member: {"secret": text} if is_secret else text for member, (text, is_secret) in values.items() if text}


def to_form(options: Mapping[str, Any]) -> dict[str, str]:
    """Convert options to form fields."""
    form = {name: format_value(options[name]) for name in (*TEXT_OPTIONS, *NUMBER_OPTIONS) if name in options}
    form.setdefault("method", "POST")
    template, headers = options.get("template"), options.get("headers", {})
    if template is not None:
        form.setdefault("body", "template")
        form["template"] = template if isinstance(template, str) else _format_json(template)
    plain = {name: value for name, value in headers.items() if isinstance(value, str)}
    secrets = {name: referenced_secret(value) for name, value in headers.items() if name not in plain}
    query = {name: value for name, value in options.get("query", {}).items() if isinstance(value, str)}
    auth = options.get("auth", {})
    form |= {
        "headers": _format_lines(plain), "secretHeaders": _format_lines(secrets), "query": _format_lines(query),
        "success": ", ".join(map(str, options.get("success", []))),
        "contains": options.get("expect", {}).get("contains", ""), "auth": auth.get("type", ""),
        "followRedirects": "1" if options.get("followRedirects") else "",
        "signed": "" if options.get("signed", True) else "0",
    }  # fmt: skip
    for members, fields in (
        (auth, AUTH_FIELDS.get(form["auth"], ())), (options.get("tls", {}), TLS_FIELDS),
        (options.get("proxy", {}), PROXY_FIELDS),
    ):  # fmt: skip
        for member, field, is_secret in fields:
            value = members.get(member, "")
            form[field] = (referenced_secret(value) or "") if is_secret else str(value)
    return form


def _parse_lines(name: str, text: str) -> dict[str, str]:
    """Parse one `NAME=VALUE` a line. Raises InvalidInput."""
    pairs = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        key, separator, value = line.partition("=")
        if not separator or not key.strip():
            raise InvalidInput(f"{name} has the line {line!r:.60}.", code="INVALID_FIELDS", fix="Write name=value.")
        pairs[key.strip()] = value.strip()
    return pairs


def _format_lines(pairs: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}={value}" for name, value in pairs.items())


def _format_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1)
