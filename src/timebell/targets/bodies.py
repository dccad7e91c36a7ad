"""What is sent to every target outside Python: a CloudEvent, the fields of `Arrived`, or a document of one's own.

The options are the same for all of them: `body` is "cloudevents", "plain" or "template", `template` the document to
fill in (`timebell.model.mapping`), and `fields` what becomes of the payload's fields before: `rename` ({"bible_code":
"bibleCode"}), `strings` (all values as strings, nulls left out) and `omitNull`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from timebell.errors import InvalidInput, InvalidPayload
from timebell.model import mapping
from timebell.model.mapping import Fields
from timebell.model.payload import encode
from timebell.targets.base import Delivery, cloudevent, facts, message_id

OPTIONS = ("body", "template", "fields")
CONTENT_TYPES = {
    "cloudevents": "application/cloudevents+json",
    "plain": "application/json",
    "template": "application/json",
}
LONGEST_TEMPLATE = 16 * 1024
LONGEST_BODY = 256 * 1024
"""Bytes. Four times the longest payload: only a template that repeats it gets there."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SAMPLE = Delivery(
    job_id="00000000-0000-0000-0000-000000000000", tenant_id="default", topic="sample", payload=None, metadata={},
    timezone="UTC", scheduled_at=_EPOCH, fired_at=_EPOCH, schedule_id=None, schedule_name=None,
    occurrence_key="00000000-0000-0000-0000-000000000000", attempt=1, upcoming=[_EPOCH] * 3,
)  # fmt: skip
SAMPLE_REPORT = {"url": "(made when it is sent)", "token": "(made when it is sent)"}
NAMES = frozenset(facts(_SAMPLE)) | {"messageId", "report"}
"""What a template's paths begin with: the fields of `Arrived` in camelCase, `messageId` to drop doubles by, and where
a worker is asked to report (`ack: reported`), `report.url` and `report.token`."""


@dataclass(frozen=True, slots=True)
class Body:
    """One body, as a JSON value and as the bytes of it."""

    content_type: str
    value: Any
    data: bytes


def checked(options: Mapping[str, Any], default: str = "cloudevents") -> dict[str, Any]:
    """The options of the body among a target's, in normal form, to be stored with it.

    Raises InvalidInput (TARGET_OPTIONS_INVALID, TEMPLATE_INVALID).
    """
    body = options.get("body", "template" if "template" in options else default)
    if not isinstance(body, str) or body not in CONTENT_TYPES:
        raise InvalidInput(
            f"body cannot be {body!r:.60}.", code="TARGET_OPTIONS_INVALID", fix="Use cloudevents, plain or template."
        )
    normal: dict[str, Any] = {"body": body}
    if (body == "template") is not ("template" in options):
        raise InvalidInput(
            "body is template, and there is none." if body == "template" else f"body is {body}, and takes no template.",
            code="TARGET_OPTIONS_INVALID",
            fix='Give both: {"body": "template", "template": {"title": "{{payload.title}}"}}.',
        )
    if body == "template":
        encode(options["template"], "template", limit=LONGEST_TEMPLATE)
        mapping.check(options["template"], NAMES)
        normal["template"] = options["template"]
    if (fields := _fields(options.get("fields"))) is not None:
        normal["fields"] = {
            key: value
            for key, value in (
                ("rename", dict(fields.rename)), ("strings", fields.strings), ("omitNull", fields.omit_null)
            )
            if value
        }  # fmt: skip
    return normal


def render(
    delivery: Delivery,
    options: Mapping[str, Any],
    default: str = "cloudevents",
    report: Mapping[str, str] | None = None,
) -> Body:
    """The body of a delivery, by options that `checked` returned; `report` says where its worker reports to.

    Raises InvalidPayload (BODY_UNFIT, MESSAGE_TOO_LARGE): no other attempt would end differently.
    """
    kind = options.get("body", default)
    if (fields := _fields(options.get("fields"))) is not None:
        delivery = replace(delivery, payload=fields.of(delivery.payload))
    if kind == "template":
        known = facts(delivery) | {"messageId": message_id(delivery)}
        value = mapping.fill(options["template"], known if report is None else known | {"report": report})
    else:
        value = cloudevent(delivery) if kind == "cloudevents" else facts(delivery)
        if report is not None:
            value.get("data", value)["report"] = report
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > LONGEST_BODY:
        raise InvalidPayload(
            f"The body would be {len(data):,} bytes; the limit is {LONGEST_BODY:,}.", code="MESSAGE_TOO_LARGE",
            fix="Let the template name less of the payload, or name it fewer times.",
        )  # fmt: skip
    return Body(CONTENT_TYPES[kind], value, data)


def sample(**known: Any) -> Delivery:
    """A delivery as it will be, for previews and checks: what is not `known` yet is made up."""
    return replace(_SAMPLE, **known)


def check_fit(options: Mapping[str, Any], **known: Any) -> None:
    """Refuse a job or schedule that will have no body. Raises InvalidPayload (BODY_UNFIT, MESSAGE_TOO_LARGE)."""
    if "template" in options or "fields" in options:
        render(sample(**known), options, report=SAMPLE_REPORT if options.get("ack") == "reported" else None)


def _fields(given: Any) -> Fields | None:
    """Raises InvalidInput (TARGET_OPTIONS_INVALID)."""
    if given is None:
        return None
    if not isinstance(given, dict) or given.keys() - {"rename", "strings", "omitNull"}:
        raise _bad_fields("fields is an object of rename, strings and omitNull")
    rename = given.get("rename") or {}
    if not isinstance(rename, dict) or not all(
        isinstance(name, str) and name for pair in rename.items() for name in pair
    ):
        raise _bad_fields('rename maps names to names: {"bible_code": "bibleCode"}')
    if len(set(rename.values())) < len(rename):
        raise _bad_fields("rename gives two fields one name")
    for switch in ("strings", "omitNull"):
        if not isinstance(given.get(switch, False), bool):
            raise _bad_fields(f"{switch} is true or false")
    return Fields(rename, given.get("strings", False), given.get("omitNull", False))


def _bad_fields(why: str) -> InvalidInput:
    return InvalidInput(f"{why}.", code="TARGET_OPTIONS_INVALID", fix="See docs/guides/bodies.md.")
