"""Convert the fields of the campaign form to the JSON of the API, and back. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from timebell.dashboard.fields import InvalidField, format_value, parse_json, parse_number, parsing_field, text_fields
from timebell.features.campaigns.model.campaign_plan import zone_or_default
from timebell.features.campaigns.pages.audience_rows import parse_rows, split_filters
from timebell.features.campaigns.push.appearance import check_appearance
from timebell.recurrence.zones import resolve_local, zone

SEND_TIME_FIELDS = {
    "at": "sendAt", "local": "localTime", "cron": "cronExpression", "localcron": "cronExpression",
}  # fmt: skip
EMPTY_FORM = {"when": "at", "at": "", "cron": "", "data": "", "filters": "", "chunkSize": "500",
              "chunkDelayMs": "2000"}  # fmt: skip
TEXT_FIELDS = (
    "name", "title", "body", "timezone", "collapseKey", "image", "link", "sound", "channel", "priority",
    "analyticsLabel",
)  # fmt: skip
NUMBER_FIELDS = ("ttl", "badge", "chunkSize", "maxRecipients", "approveAbove")
JSON_FIELDS = ("data", "filters", "variants", "android", "apns", "webpush")
EDITABLE_FIELDS = (
    *TEXT_FIELDS, *NUMBER_FIELDS, *JSON_FIELDS, "expiresAt", "marketing", "translations", "actions", "chunkDelayMs",
    "quietHours", "canary", "localTime", "holdOut", "trackOpens",
)  # fmt: skip
"""Fields of a campaign that the form sets; an empty one resets the field of an edited campaign."""
FORM_FIELDS = {
    "sendAt": "at", "localTime": "at", "runAt": "at", "SCHEDULE_IN_THE_PAST": "at", "cronExpression": "cron",
    "PUSH_MESSAGE_TOO_LARGE": "body", "translations": "language1", "actions": "actionTitle1",
    "quietHours": "quietStart", "canary": "canarySize", "size": "canarySize", "maxErrorRate": "canaryRate",
}  # fmt: skip
"""Form fields by their names or error codes in the API, if they differ."""
MAX_ROWS = 50
ACTION_ROWS = 2
"""Buttons that browsers show in a notification."""


def to_request_body(form: Mapping[str, str]) -> dict[str, Any]:
    """Convert form fields to a request body of the API. Raises InvalidInput."""
    body: dict[str, Any] = text_fields(form, *TEXT_FIELDS)
    body |= {name: number for name in NUMBER_FIELDS if (number := parse_number(name, form.get(name, ""))) is not None}
    body |= {name: value for name in JSON_FIELDS if (value := parse_json(name, form.get(name, ""))) is not None}
    body |= _parse_send_time(form)
    if translations := _parse_translations(form):
        body["translations"] = translations
    if actions := _parse_actions(form):
        body["actions"] = actions
    if conditions := parse_rows(form):
        filters = body.get("filters", {})
        if isinstance(filters, dict) and isinstance(filters.get("all", []), list):  # otherwise the API refuses it
            body["filters"] = {**filters, "all": [*filters.get("all", []), *conditions]}
    consents = {"pushOnOff": "pushOnOff", "marketing": "marketingOnOff"}
    required = {filter_name: True for name, filter_name in consents.items() if form.get(name)}
    if required and isinstance(filters := body.get("filters", {}), dict):  # otherwise the API refuses it
        body["filters"] = {**filters, **required}
    if form.get("marketing"):
        body["marketing"] = True
    body |= _parse_experiment(form)
    if delay := form.get("chunkDelayMs", "").strip():
        body["chunkDelayMs"] = delay if delay == "adaptive" else parse_number("chunkDelayMs", delay)
    if expiry := text_fields(form, "expiresAt"):
        body["expiresAt"] = _to_instant(expiry["expiresAt"], body.get("timezone"))
    if quiet := text_fields(form, "quietStart", "quietEnd"):
        if len(quiet) == 1:
            raise InvalidField(
                "quietEnd" if "quietStart" in quiet else "quietStart", "The quiet hours have only one time.",
                code="INVALID_CAMPAIGN", fix="Enter both “Quiet from” and “Quiet to”, or neither.",
            )  # fmt: skip
        body["quietHours"] = {
            "start": quiet["quietStart"], "end": quiet["quietEnd"], "then": form.get("quietThen") or "wait",
        }  # fmt: skip
    if canary := _parse_canary(form):
        body["canary"] = canary
    return body


def is_unfinished(form: Mapping[str, str]) -> bool:
    """Return whether a button adds a row to the form or previews it, instead of saving it."""
    return any(name in form for name in ("languages", "conditions", "preview"))


def has_send_time(form: Mapping[str, str]) -> bool:
    """Return whether the form says when to send."""
    return form.get("when") == "now" or bool(_send_time(form))


def _send_time(form: Mapping[str, str]) -> str:
    return form.get(_send_time_field(form), "").strip()


def _send_time_field(form: Mapping[str, str]) -> str:
    return "cron" if form.get("when", "at").endswith("cron") else "at"


def _parse_send_time(form: Mapping[str, str]) -> dict[str, Any]:
    when = form.get("when", "at")
    if when == "now":
        return {}
    text = _send_time(form)
    if when not in SEND_TIME_FIELDS or not text:
        field = _send_time_field(form)
        raise InvalidField(
            field, "The campaign has no send time.", code="INVALID_CAMPAIGN",
            fix="Enter a cron expression, e.g. 0 9 * * 1-5." if field == "cron" else "Enter a date and a time.",
        )  # fmt: skip
    return {SEND_TIME_FIELDS[when]: text} | ({"inRecipientZones": True} if when == "localcron" else {})


def _parse_canary(form: Mapping[str, str]) -> dict[str, Any]:
    size, rate = (parse_number(name, form.get(name, "")) for name in ("canarySize", "canaryRate"))
    if size is None and rate is not None:
        raise InvalidField(
            "canarySize", "The canary has no devices.", code="INVALID_CAMPAIGN",
            fix="Enter their number, or no maximum of failures.",
        )  # fmt: skip
    return {} if size is None else {"size": size, "maxErrorRate": 0.05 if rate is None else rate / 100}


def _parse_translations(form: Mapping[str, str]) -> dict[str, dict[str, str]]:
    translations = {}
    for n in range(1, count_language_rows(form) + 1):
        row = text_fields(form, f"language{n}", f"title{n}", f"body{n}")
        texts = {name: row[f"{name}{n}"] for name in ("title", "body") if f"{name}{n}" in row}
        if not row:
            continue
        if f"language{n}" not in row or not texts:
            raise InvalidField(
                f"language{n}", f"Language {n} is incomplete.", code="INVALID_CAMPAIGN",
                fix="Enter a language such as ko or pt-BR, and its title, its body or both.",
            )  # fmt: skip
        if row[f"language{n}"] in translations:
            raise InvalidField(
                f"language{n}", f"The language {row[f'language{n}']!r:.40} occurs twice.", code="INVALID_CAMPAIGN",
                fix="Remove one.",
            )  # fmt: skip
        translations[row[f"language{n}"]] = texts
    return translations


def _parse_experiment(form: Mapping[str, str]) -> dict[str, Any]:
    variants, share = _parse_variants(form), parse_number("holdOut", form.get("holdOut", ""))
    if not variants and text_fields(form, "shareB"):
        raise InvalidField(
            "titleB", "Variant B has no texts.", code="INVALID_CAMPAIGN", fix="Enter some, or remove its share."
        )
    with parsing_field("imageB"):
        check_appearance({"image": text_fields(form, "imageB").get("imageB")})
    if variants and not 0 < variants[1]["share"] < 1:
        raise InvalidField(
            "shareB", f"The share of variant B is {100 * variants[1]['share']:g} %.", code="INVALID_CAMPAIGN",
            fix="Enter more than 0 and less than 100, or leave it empty for 50.",
        )  # fmt: skip
    options = {
        "variants": variants or None, "holdOut": None if share is None else share / 100,
        "trackOpens": bool(form.get("trackOpens")) or None,
    }  # fmt: skip
    return {name: value for name, value in options.items() if value is not None}


def _parse_variants(form: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the two variants of the form: the message as it is, and with the texts of variant B."""
    texts = text_fields(form, "titleB", "bodyB", "imageB")
    if not texts:
        return []
    share = parse_number("shareB", form.get("shareB", ""))
    share = 0.5 if share is None else share / 100
    return [
        {"name": "A", "share": round(1 - share, 6)},
        {"name": "B", "share": share, **{name.removesuffix("B"): text for name, text in texts.items()}},
    ]


def _parse_actions(form: Mapping[str, str]) -> list[dict[str, str]]:
    actions = []
    for n in range(1, ACTION_ROWS + 1):
        row = text_fields(form, f"action{n}", f"actionTitle{n}")
        for name in (f"actionTitle{n}", f"action{n}"):
            if row and name not in row:
                raise InvalidField(
                    name, f"Button {n} is incomplete.", code="INVALID_CAMPAIGN",
                    fix="Enter its text and its action, or neither.",
                )  # fmt: skip
        if row:
            actions.append({"action": row[f"action{n}"], "title": row[f"actionTitle{n}"]})
    return actions


def count_language_rows(form: Mapping[str, str]) -> int:
    """Return the number of language rows: those with a value, or more after "Add language"."""
    requested = form.get("languages", "")
    return min(MAX_ROWS, max([int(requested) if requested.isdecimal() else 0, *_filled_rows(form)]))


def _filled_rows(form: Mapping[str, str]) -> Iterator[int]:
    for name, value in form.items():
        for prefix in ("language", "title", "body"):
            number = name.removeprefix(prefix)
            if value.strip() and number != name and number.isdecimal():
                yield int(number)


def to_form(record: Mapping[str, Any]) -> dict[str, str]:
    """Convert a campaign of the API to form fields."""
    form = {name: format_value(record[name]) for name in (*TEXT_FIELDS, *NUMBER_FIELDS) if record.get(name) is not None}
    filters, conditions = split_filters(record.get("filters", {}))
    form |= conditions
    if filters.pop("pushOnOff", False):
        form["pushOnOff"] = "1"
    if record.get("marketing"):
        form["marketing"] = "1"
        del filters["marketingOnOff"]
    documents = {**record, "filters": filters}
    form |= {
        name: json.dumps(documents[name], ensure_ascii=False, indent=2) for name in JSON_FIELDS if documents.get(name)
    }
    form |= _variant_fields(form, record.get("variants", []))
    if record.get("holdOut"):
        form["holdOut"] = format_value(round(100 * record["holdOut"], 4))
    if record.get("trackOpens"):
        form["trackOpens"] = "1"
    if record.get("expiresAt"):
        form["expiresAt"] = _format_local(record["expiresAt"], record["timezone"])
    form |= {"when": "at", "at": _format_local(record["sendAt"], record["timezone"])}
    if record.get("localTime"):
        form |= {"when": "local", "at": record["localTime"].removesuffix(":00")}
    for n, (language, texts) in enumerate(record.get("translations", {}).items(), 1):
        form |= {f"language{n}": language, f"title{n}": texts.get("title", ""), f"body{n}": texts.get("body", "")}
    for n, action in enumerate(record.get("actions", []), 1):
        form |= {f"action{n}": action["action"], f"actionTitle{n}": action["title"]}
    if "chunkDelayMs" in record:
        form["chunkDelayMs"] = str(record["chunkDelayMs"])
    if quiet := record.get("quietHours"):
        form |= {"quietStart": quiet["start"], "quietEnd": quiet["end"], "quietThen": quiet["then"]}
    if canary := record.get("canary"):
        form |= {"canarySize": str(canary["size"]), "canaryRate": format_value(100 * canary["maxErrorRate"])}
    return form


def _variant_fields(form: dict[str, str], variants: Any) -> dict[str, str]:
    """Return the fields of variant B, instead of the JSON of the variants, if they are as the form makes them."""
    fields = {}
    if len(variants) == 2:
        fields = {f"{name}B": value for name, value in variants[1].items() if name in ("title", "body", "image")}
        fields |= {"shareB": format_value(round(100 * variants[1]["share"], 4))}
    if not fields or _parse_variants(fields) != variants:
        return {}
    del form["variants"]
    return fields


def _to_instant(text: str, timezone: str | None) -> str:
    """Return the instant of a local time in the zone of the campaign. Raises InvalidInput."""
    try:
        local = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidField(
            "expiresAt", f"“Not after” is {text!r:.40}, which is not a time.", code="INVALID_CAMPAIGN",
            fix="Enter one, e.g. 2027-01-01T09:00.",
        ) from None  # fmt: skip
    if local.tzinfo is not None:
        return text
    if timezone is None:
        raise InvalidField(
            "timezone", "“Not after” is a local time without a time zone.", code="INVALID_CAMPAIGN",
            fix="Enter the time zone.",
        )  # fmt: skip
    return resolve_local(local, zone(timezone))[0].isoformat()


def _format_local(instant: str | None, timezone: str | None) -> str:
    if instant is None:
        return ""
    local = zone_or_default(timezone, "UTC").local(datetime.fromisoformat(instant))
    return local.replace(tzinfo=None).isoformat(timespec="minutes" if not local.second else "seconds")
