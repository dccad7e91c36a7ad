"""Message bodies for targets outside Python: a CloudEvent, the fields of `Arrived`, or a custom template.

All these targets have the same options: `body` is "cloudevents", "plain" or "template"; `template` is the document to
fill in (`timebell.model.mapping`); `fields` first transforms the payload's fields: `rename` ({"bible_code":
"bibleCode"}), `strings` (all values as strings, nulls omitted) and `omitNull`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

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
MAX_TEMPLATE_BYTES = 16 * 1024
MAX_BODY_BYTES = 256 * 1024
"""Four times the maximum payload size; only a template that repeats the payload exceeds it."""

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


@dataclass(frozen=True, slots=True)
class Body:
    """A rendered body, as a JSON value and encoded."""

    content_type: str
    value: Any
    data: bytes


def check_options(options: Mapping[str, Any], default: str = "cloudevents") -> dict[str, Any]:
    """Validate the body options of a target and return their normal form.

    Raises InvalidInput (INVALID_TARGET_OPTIONS, INVALID_TEMPLATE).
    """
    body = options.get("body", "template" if "template" in options else default)
    if not isinstance(body, str) or body not in CONTENT_TYPES:
        raise InvalidInput(
            f"body cannot be {body!r:.60}.", code="INVALID_TARGET_OPTIONS", fix="Use cloudevents, plain or template."
        )
    checked: dict[str, Any] = {"body": body}
    if (body == "template") is not ("template" in options):
        raise InvalidInput(
            "body is template, but template is missing."
            if body == "template"
            else f"body is {body}, which takes no template.",
            code="INVALID_TARGET_OPTIONS",
            fix='Give both: {"body": "template", "template": {"title": "{{payload.title}}"}}.',
        )
    if body == "template":
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
        known = event_fields(delivery) | {"messageId": message_id(delivery)}
        value = mapping.fill_template(options["template"], known if report is None else known | {"report": report})
    else:
        value = cloudevent(delivery) if kind == "cloudevents" else event_fields(delivery)
        if report is not None:
            value.get("data", value)["report"] = report
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > MAX_BODY_BYTES:
        raise InvalidPayload(
            f"The body would be {len(data):,} bytes; the limit is {MAX_BODY_BYTES:,}.", code="MESSAGE_TOO_LARGE",
            fix="Include less of the payload in the template, or repeat it fewer times.",
        )  # fmt: skip
    return Body(CONTENT_TYPES[kind], value, data)


def sample_delivery(**known: Any) -> Delivery:
    """Return a delivery with the `known` fields and sample values for the others, for previews and checks."""
    return replace(_SAMPLE, **known)


def check_renders(options: Mapping[str, Any], **known: Any) -> None:
    """Check that a body can be rendered. Raises InvalidPayload (INVALID_BODY, MESSAGE_TOO_LARGE)."""
    if "template" in options or "fields" in options:
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
