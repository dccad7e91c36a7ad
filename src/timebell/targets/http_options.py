"""Options of the target `http`: validation and normal form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from timebell import http_client
from timebell.errors import InvalidInput
from timebell.model.policy import parse_seconds
from timebell.model.target import target_limits
from timebell.targets import bodies
from timebell.targets.address import AddressGuard
from timebell.targets.base import reject_unknown_options
from timebell.targets.client_tls import create_context
from timebell.targets.http_authentication import check_authentication
from timebell.targets.http_responses import check_expectation, check_success

OPTIONS = (
    "url", "method", "query", "headers", "contentType", "timeout", "success", "expect", "followRedirects", "signed",
    "reportsBack", "auth", "tls", "proxy", "concurrency", "rate", "perSeconds", "signingSecrets", *bodies.OPTIONS,
)  # fmt: skip
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
METHODS_WITH_BODY = ("POST", "PUT", "PATCH")
"""Methods that send an event unless `body` says otherwise; the others have no body."""
MIN_TIMEOUT_SECONDS = 0.001
MAX_TIMEOUT_SECONDS = 1800.0
MAX_PEM_BYTES = 64 * 1024

_HEADER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_HEADER_VALUE = re.compile(r"[!-~](?:[ -~]{0,1022}[!-~])?")
_RESERVED_HEADERS = re.compile(
    r"host|connection|keep-alive|te|trailer|transfer-.*|upgrade|expect|proxy-.*|accept-encoding|content-.*"
    r"|webhook-.*|timebell-.*",
    re.IGNORECASE,
)
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+(?: ?;[ -~]{1,200})?")


def check_options(options: Mapping[str, Any], guard: AddressGuard) -> dict[str, Any]:
    """Validate options and return their normal form, in which options with default values are omitted.

    Raises InvalidInput (INVALID_URL, INVALID_HEADER, INVALID_TARGET_OPTIONS, INVALID_TEMPLATE, INVALID_TIMEOUT,
    INVALID_CERTIFICATE) or Refused (PRIVATE_ADDRESS, PORT_REFUSED, HTTP_OFF, EXTRA_MISSING).
    """
    reject_unknown_options(dict(options), OPTIONS)
    method = options.get("method", "POST")
    if not isinstance(method, str) or method not in METHODS:
        raise _invalid(f"method cannot be {method!r:.60}", f"Use {', '.join(METHODS)}.")
    body = bodies.check_options(
        options, "cloudevents" if method in METHODS_WITH_BODY else "none", tuple(bodies.HTTP_CONTENT_TYPES)
    )
    checked: dict[str, Any] = {
        "url": guard.check_url(options.get("url")).url,
        "headers": _check_headers(options.get("headers")),
        **body,
    }
    if method != "POST":
        checked["method"] = method
    if options.get("query"):
        checked["query"] = bodies.check_query(options["query"])
    if "contentType" in options:
        checked["contentType"] = _check_content_type(options["contentType"], body["body"])
    if "timeout" in options:
        checked["timeout"] = check_timeout(parse_seconds(options["timeout"], "timeout"))
    if "success" in options:
        checked["success"] = check_success(options["success"])
    if "expect" in options:
        checked["expect"] = check_expectation(options["expect"])
    for name, default in (("reportsBack", False), ("followRedirects", False), ("signed", True)):
        value = options.get(name, default)
        if not isinstance(value, bool):
            raise _invalid(f"{name} cannot be {value!r:.60}", "Use true or false.")
        if value is not default:
            checked[name] = value
    return checked | _check_named_options(options, guard, checked["headers"])


def _check_named_options(options: Mapping[str, Any], guard: AddressGuard, headers: Mapping[str, str]) -> dict[str, Any]:
    """Validate the options that only named targets have."""
    checked: dict[str, Any] = {}
    if "auth" in options:
        if "authorization" in headers:
            raise _invalid("auth and the header authorization exclude each other", "Remove one of them.")
        checked["auth"] = check_authentication(options["auth"], guard)
    if "tls" in options:
        checked["tls"] = _check_tls(options["tls"])
    if "proxy" in options:
        checked["proxy"] = _check_proxy(options["proxy"], guard)
    if (limits := target_limits(options)) is not None:
        checked |= {
            name: value
            for name, value in (
                ("concurrency", limits.concurrency), ("rate", limits.rate),
                ("perSeconds", None if limits.rate is None else limits.per),
            )
            if value is not None
        }  # fmt: skip
    if "signingSecrets" in options:
        checked["signingSecrets"] = options["signingSecrets"]
    return checked


def check_timeout(seconds: float) -> float:
    """Return a valid timeout of a request, in seconds. Raises InvalidInput (INVALID_TIMEOUT)."""
    if not MIN_TIMEOUT_SECONDS <= seconds <= MAX_TIMEOUT_SECONDS:
        raise InvalidInput(
            f"The timeout of a request is {seconds:g} s.", code="INVALID_TIMEOUT",
            fix=f"Use more than 0 s and at most {MAX_TIMEOUT_SECONDS / 60:g} min.",
        )  # fmt: skip
    return seconds


def _check_content_type(value: Any, body: str) -> str:
    if not isinstance(value, str) or not _MEDIA_TYPE.fullmatch(value):
        raise _invalid(f"contentType cannot be {value!r:.60}", "Use a media type such as text/csv.")
    if body in ("none", "multipart"):
        raise _invalid(f"contentType cannot be set for the body {body}", "Omit it.")
    return value


def _check_tls(tls: Any) -> dict[str, str]:
    """Validate `tls`: `ca`, `certificate` and `key`, each in PEM form."""
    fields = check_object(tls, "tls", optional=("ca", "certificate", "key"), max_bytes=MAX_PEM_BYTES)
    if not fields or ("certificate" in fields) is not ("key" in fields):
        raise _invalid("tls needs ca, or certificate and key", 'Example: {"ca": "-----BEGIN CERTIFICATE-----..."}.')
    with suppress(http_client.TLSError):  # the system has no authorities here; deliveries fail with TLS_FAILED
        create_context(fields.get("ca"), fields.get("certificate"), fields.get("key"))
    return fields


def _check_proxy(proxy: Any, guard: AddressGuard) -> dict[str, str]:
    """Validate `proxy`: `url`, and `username` with `password`."""
    fields = check_object(proxy, "proxy", ("url",), ("username", "password"))
    if ("username" in fields) is not ("password" in fields):
        raise _invalid("proxy needs both username and password, or neither", "Add the other one.")
    guard.check_proxy(fields["url"])
    return fields


def check_object(
    value: Any, name: str, required: tuple[str, ...] = (), optional: tuple[str, ...] = (), *, max_bytes: int = 16_384
) -> dict[str, str]:
    """Return an option that is an object with string values. Raises InvalidInput (INVALID_TARGET_OPTIONS).

    All of `required` must be present; members of neither list are refused. `max_bytes` limits each value.
    """
    if not isinstance(value, dict):
        raise _invalid(f"{name} is {value!r:.60}", f"Use an object with {', '.join((*required, *optional))}.")
    for member, text in value.items():
        if member not in required + optional:
            raise _invalid(f"{name} has no member {member!r:.60}", f"It has: {', '.join((*required, *optional))}.")
        if not isinstance(text, str) or not 0 < len(text) <= max_bytes:
            raise _invalid(f"{name}.{member} must be a string of 1 to {max_bytes:,} characters")
    for member in required:
        if member not in value:
            raise _invalid(f"{name}.{member} is missing")
    return dict(value)


def _check_headers(headers: Any) -> dict[str, str]:
    """Validate extra headers and return them with lower-case names.

    Values are visible ASCII; headers that frame or sign the request are reserved.
    """
    if headers is None:
        return {}
    if not isinstance(headers, dict) or len(headers) > 20:
        raise InvalidInput("headers must be an object with at most 20 entries.", code="INVALID_HEADER")
    for name, value in headers.items():
        is_allowed_name = (
            isinstance(name, str) and _HEADER_NAME.fullmatch(name) and not _RESERVED_HEADERS.fullmatch(name)
        )
        if not is_allowed_name or not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            raise InvalidInput(
                f"The header {name!r} cannot be set.",
                code="INVALID_HEADER",
                fix="Names are letters, digits, - and _; values are 1 to 1,024 visible ASCII characters. "
                "Host, Connection, Content-*, Webhook-* and other protocol headers are reserved; contentType sets the "
                "type of the body.",
            )
    return {name.lower(): value for name, value in headers.items()}


def _invalid(problem: str, fix: str = "") -> InvalidInput:
    return InvalidInput(f"{problem}.", code="INVALID_TARGET_OPTIONS", fix=fix)
