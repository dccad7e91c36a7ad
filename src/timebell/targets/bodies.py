"""Message bodies for targets outside Python: a CloudEvent, the fields of `Arrived`, or a custom template.

All these targets have the same options: `body` is "cloudevents", "plain" or "template"; `template` is the document to
fill in (`timebell.model.mapping`); `fields` first transforms the payload's fields: `rename` ({"bible_code":
"bibleCode"}), `strings` (all values as strings, nulls omitted) and `omitNull`.

HTTP requests have five more bodies. `json`, `text`, `form` and `multipart` are the payload itself, or for the last
three the `template`: text, or an object of form fields. `none` sends no body.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import orjson

from timebell.errors import InvalidInput, InvalidPayload
from timebell.model import mapping
from timebell.model.mapping import FieldMapping
from timebell.model.payload import encode
from timebell.targets.base import Delivery, cloudevent, event_fields, message_id

OPTIONS = ("body", "template", "fields")
CONTENT_TYPES = {
    "cloudevents": "application/cloudevents+json",
    "plain": "application/json",
    "template": "application/json",
}
HTTP_CONTENT_TYPES = CONTENT_TYPES | {
    "json": "application/json",
    "text": "text/plain; charset=utf-8",
    "form": "application/x-www-form-urlencoded",
    "multipart": "multipart/form-data",
    "none": "",
}
_FORMS = ("form", "multipart")
_TEMPLATE_OPTIONAL = ("text", *_FORMS)
"""Bodies that are the template, or without one the payload."""
MAX_TEMPLATE_BYTES = 16 * 1024
MAX_QUERY_PARAMETERS = 50
MAX_BODY_BYTES = 256 * 1024
"""Four times the maximum payload size; only a template that repeats the payload exceeds it."""

_encode_escaped = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SAMPLE = Delivery(
    job_id="00000000-0000-0000-0000-000000000000", tenant_id="default", topic="sample", payload=None, metadata={},
    timezone="UTC", scheduled_at=_EPOCH, fired_at=_EPOCH, schedule_id=None, schedule_name=None,
    occurrence_key="00000000-0000-0000-0000-000000000000", attempt=1, upcoming=[_EPOCH] * 3,
)  # fmt: skip
SAMPLE_REPORT = {"url": "(generated when sent)", "token": "(generated when sent)"}
TEMPLATE_NAMES = frozenset(event_fields(_SAMPLE)) | {"messageId", "report"}
"""First path segments allowed in a template: the fields of `Arrived` in camelCase, `messageId` for deduplication, and
`report` (`report.url`, `report.token`) for workers that report the result (`ack: reported`)."""


class Body(NamedTuple):
    """A rendered body, as a JSON value and encoded."""

    content_type: str
    value: Any
    data: bytes


def check_options(
    options: Mapping[str, Any], default: str = "cloudevents", kinds: Collection[str] = tuple(CONTENT_TYPES)
) -> dict[str, Any]:
    """Validate the body options of a target and return their normal form.

    `kinds` are the bodies that the target supports. Raises InvalidInput (INVALID_TARGET_OPTIONS, INVALID_TEMPLATE).
    """
    body = options.get("body", "template" if "template" in options else default)
    if not isinstance(body, str) or body not in kinds:
        *others, last = kinds
        raise InvalidInput(
            f"body cannot be {body!r:.60}.", code="INVALID_TARGET_OPTIONS", fix=f"Use {', '.join(others)} or {last}."
        )
    checked: dict[str, Any] = {"body": body}
    if (body == "template") is not ("template" in options) and body not in _TEMPLATE_OPTIONAL:
        raise InvalidInput(
            "body is template, but template is missing."
            if body == "template"
            else f"body is {body}, which takes no template.",
            code="INVALID_TARGET_OPTIONS",
            fix='Give both: {"body": "template", "template": {"title": "{{payload.title}}"}}.',
        )
    if "template" in options:
        _check_template_type(body, options["template"])
        encode(options["template"], "template", limit=MAX_TEMPLATE_BYTES)
        mapping.check_template(options["template"], TEMPLATE_NAMES)
        checked["template"] = options["template"]
    if (fields := _parse_fields(options.get("fields"))) is not None:
        checked["fields"] = {
            key: value
            for key, value in (
                ("rename", dict(fields.rename)), ("strings", fields.strings), ("omitNull", fields.omit_null)
            )
            if value
        }  # fmt: skip
    return checked


def _check_template_type(body: str, template: Any) -> None:
    """Check that a template has the type of its body. Raises InvalidInput (INVALID_TEMPLATE)."""
    if body == "text" and not isinstance(template, str):
        raise InvalidInput("body is text, but template is not a string.", code="INVALID_TEMPLATE")
    if body in _FORMS and not isinstance(template, dict):
        raise InvalidInput(
            f"body is {body}, but template is not an object.",
            code="INVALID_TEMPLATE",
            fix='Use an object of form fields: {"title": "{{payload.title}}"}.',
        )


def check_query(query: Any) -> dict[str, Any]:
    """Validate query parameters. Raises InvalidInput (INVALID_TARGET_OPTIONS, INVALID_TEMPLATE)."""
    if not isinstance(query, dict) or len(query) > MAX_QUERY_PARAMETERS:
        raise InvalidInput(
            f"query must be an object with at most {MAX_QUERY_PARAMETERS} parameters.",
            code="INVALID_TARGET_OPTIONS",
            fix='Example: {"date": "{{scheduledAt}}", "tag": ["a", "b"]}.',
        )
    encode(query, "query", limit=MAX_TEMPLATE_BYTES)
    mapping.check_template(query, TEMPLATE_NAMES, "query")
    return query


def render_query(delivery: Delivery, query: Mapping[str, Any]) -> str:
    """Return query parameters percent-encoded. Raises InvalidPayload (INVALID_BODY)."""
    return urlencode(_form_fields(mapping.fill_template(query, template_values(delivery), "query")), quote_via=quote)


def template_values(delivery: Delivery) -> dict[str, Any]:
    """Return the values for the placeholders of a template."""
    return event_fields(delivery) | {"messageId": message_id(delivery)}


def render(
    delivery: Delivery,
    options: Mapping[str, Any],
    default: str = "cloudevents",
    report: Mapping[str, str] | None = None,
) -> Body:
    """Render the body of a delivery, with options returned by `check_options`.

    `report` has the URL and token for a worker that reports the result. Raises InvalidPayload (INVALID_BODY,
    MESSAGE_TOO_LARGE), which another attempt would not fix.
    """
    kind = options.get("body", default)
    if (fields := _parse_fields(options.get("fields"))) is not None:
        delivery = replace(delivery, payload=fields.apply(delivery.payload))
    if kind == "template":
        known = template_values(delivery)
        value = mapping.fill_template(options["template"], known if report is None else known | {"report": report})
    elif kind in HTTP_CONTENT_TYPES and kind not in CONTENT_TYPES:
        return _limit_size(_render_http(delivery, kind, options))
    else:
        value = cloudevent(delivery) if kind == "cloudevents" else event_fields(delivery)
        if report is not None:
            value.get("data", value)["report"] = report
    return _limit_size(Body(CONTENT_TYPES[kind], value, _to_json(value)))


def _render_http(delivery: Delivery, kind: str, options: Mapping[str, Any]) -> Body:
    """Render a body that only HTTP requests have. Raises InvalidPayload (INVALID_BODY)."""
    value: Any = None if kind == "none" else delivery.payload
    if "template" in options:
        value = mapping.fill_template(options["template"], template_values(delivery))
    content_type = HTTP_CONTENT_TYPES[kind]
    if kind == "json":
        data = _to_json(value)
    elif kind == "form":
        data = urlencode(_form_fields(value)).encode()
    elif kind == "multipart":
        boundary = f"timebell-{secrets.token_hex(16)}"
        data, content_type = _encode_multipart(_form_fields(value), boundary), f"{content_type}; boundary={boundary}"
    elif value is None and "template" not in options:
        data = b""
    elif value is None:
        raise InvalidPayload("The body cannot be built: template is null.", code="INVALID_BODY")
    else:
        data = mapping.to_text(value).encode()
    return Body(content_type, value, data)


def _form_fields(value: Any) -> list[tuple[str, str]]:
    """Return the fields of a form; the members of a list have the same name. Raises InvalidPayload (INVALID_BODY)."""
    if not isinstance(value, Mapping):
        raise _invalid_form("the payload is not an object")
    fields = []
    for name, member in value.items():
        for each in member if isinstance(member, list) else [member]:
            if each is None or isinstance(each, list | Mapping):
                raise _invalid_form(f"{name!r:.60} is neither text, a number nor a boolean")
            fields.append((str(name), mapping.to_text(each)))
    return fields


def _invalid_form(reason: str) -> InvalidPayload:
    return InvalidPayload(
        f"The form cannot be built: {reason}.",
        code="INVALID_BODY",
        fix="Use text, numbers, booleans, and lists of them.",
    )


def _encode_multipart(fields: list[tuple[str, str]], boundary: str) -> bytes:
    """Encode form fields as RFC 7578, with names escaped as browsers do (WHATWG HTML, multipart/form-data)."""
    parts = []
    for name, value in fields:
        escaped = name.replace("\r", "%0D").replace("\n", "%0A").replace('"', "%22")
        parts.append(f'--{boundary}\r\ncontent-disposition: form-data; name="{escaped}"\r\n\r\n{value}\r\n')
    return ("".join(parts) + f"--{boundary}--\r\n").encode()


def _to_json(value: Any) -> bytes:
    """Encode a body in ASCII, because some message queues refuse certain other characters."""
    data = orjson.dumps(value)
    return data if data.isascii() else _encode_escaped(value).encode()


def _limit_size(body: Body) -> Body:
    """Return the body. Raises InvalidPayload (MESSAGE_TOO_LARGE)."""
    if len(body.data) > MAX_BODY_BYTES:
        raise InvalidPayload(
            f"The body would be {len(body.data):,} bytes; the limit is {MAX_BODY_BYTES:,}.", code="MESSAGE_TOO_LARGE",
            fix="Include less of the payload in the template, or repeat it fewer times.",
        )  # fmt: skip
    return body


def sample_delivery(**known: Any) -> Delivery:
    """Return a delivery with the `known` fields and sample values for the others, for previews and checks."""
    return replace(_SAMPLE, **known)


def check_renders(options: Mapping[str, Any], **known: Any) -> None:
    """Check that body and query can be rendered. Raises InvalidPayload (INVALID_BODY, MESSAGE_TOO_LARGE)."""
    if "query" in options:
        render_query(sample_delivery(**known), options["query"])
    if "template" in options or "fields" in options or options.get("body") in _TEMPLATE_OPTIONAL:
        render(sample_delivery(**known), options, report=SAMPLE_REPORT if options.get("ack") == "reported" else None)


def _parse_fields(fields: Any) -> FieldMapping | None:
    """Parse the `fields` option. Raises InvalidInput (INVALID_TARGET_OPTIONS)."""
    if fields is None:
        return None
    if not isinstance(fields, dict) or fields.keys() - {"rename", "strings", "omitNull"}:
        raise _invalid_fields("fields must be an object with rename, strings and omitNull")
    rename = fields.get("rename") or {}
    if not isinstance(rename, dict) or not all(
        isinstance(name, str) and name for pair in rename.items() for name in pair
    ):
        raise _invalid_fields('rename must map names to names: {"bible_code": "bibleCode"}')
    if len(set(rename.values())) < len(rename):
        raise _invalid_fields("rename maps two fields to one name")
    for name in ("strings", "omitNull"):
        if not isinstance(fields.get(name, False), bool):
            raise _invalid_fields(f"{name} must be true or false")
    return FieldMapping(rename, fields.get("strings", False), fields.get("omitNull", False))


def _invalid_fields(reason: str) -> InvalidInput:
    return InvalidInput(f"{reason}.", code="INVALID_TARGET_OPTIONS", fix="See docs/guides/bodies.md.")
