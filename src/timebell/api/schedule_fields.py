"""JSON form of schedules. Requests and responses use the same field names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from timebell.api.conditions import ComparisonOut, Condition, UnlessIn, UnlessOut
from timebell.api.if_match import entity_tag
from timebell.api.job_fields import Warnings
from timebell.api.schemas import Instant, Json, Name, RequestBody, ResponseBody, ZoneName, format_utc
from timebell.client.job_fields import metadata_json, parse_metadata, parse_retry, target_json
from timebell.durations import parse_duration
from timebell.errors import InvalidInput
from timebell.model.policy import Retry
from timebell.model.schedule import Schedule
from timebell.recurrence import Cron, Dates, Every, OnCalendar, RRule, Spec, parse_cron, resolve_local, zone
from timebell.recurrence.codec import spec_from_json
from timebell.recurrence.instants import format_instant, parse_instant

DEFAULT_TIMEOUT_SECONDS = 3600.0  # for occurrences of schedules without a timeout
RECURRENCE_FIELDS = ("cron_expression", "interval", "rrule", "dates", "recurrence")
FIELD_ALIASES = {"job_type": "topic", "job_payload": "payload"}
Seconds = Annotated[float | str, Field(description="Seconds, or a duration such as 90s, 15m, 24h.")]
Labels = dict[str, str]


class IntervalIn(RequestBody):
    """Fixed interval: `everyMs` of elapsed time, or `every` as an ISO 8601 duration (P1M keeps the local time)."""

    every_ms: Annotated[int | None, Field(ge=1, le=10**13)] = None
    every: Annotated[str | None, Field(max_length=64)] = None
    anchor: Instant | None = None
    since: Literal["last_end", "last_start"] | None = None


class DstIn(RequestBody):
    """Handling of local times that a DST change skips (gap) or repeats (fold)."""

    gap: Literal["end", "shift", "skip"] | None = None
    fold: Literal["first", "last", "both"] | None = None


class CatchUpIn(RequestBody):
    """Handling of missed occurrences."""

    policy: Literal["latest", "all", "skip"] | None = None
    window: Seconds | None = None
    limit: Annotated[int | None, Field(ge=0, le=10**6)] = None
    pace: Seconds | None = None
    hold_above: Annotated[int | None, Field(ge=0, le=10**9)] = None


class ScheduleIn(RequestBody):
    """Fields of a schedule. A name, a topic and exactly one recurrence are required; the rest has defaults."""

    name: Name | None = None
    description: Annotated[str | None, Field(max_length=2000)] = None
    cron_expression: Annotated[str | None, Field(max_length=256)] = None
    interval: IntervalIn | None = None
    rrule: Annotated[str | None, Field(max_length=20_000)] = None
    dates: Annotated[list[Instant] | None, Field(max_length=10_000)] = None
    recurrence: dict[str, Json] | None = None
    timezone: ZoneName | None = None
    topic: Name | None = None
    job_type: Name | None = None
    payload: Json = None
    job_payload: Json = None
    max_retries: Annotated[int | None, Field(ge=0, le=999)] = None
    retry: dict[str, Json] | None = None
    timeout_seconds: Annotated[float | None, Field(gt=0, lt=1e10)] = None
    overlap_policy: Literal["skip", "queue", "cancel_previous", "allow"] | None = None
    catch_up: CatchUpIn | None = None
    missed_after_seconds: Annotated[float | None, Field(ge=0, lt=1e10)] = None
    when_late: Literal["run", "expire"] | None = None
    tolerance_seconds: Annotated[float | None, Field(ge=0, lt=1e10)] = None
    dst: DstIn | None = None
    calendar: Annotated[str | None, Field(max_length=210)] = None
    roll: Literal["skip", "next", "previous"] | None = None
    jitter_seconds: Annotated[float | None, Field(ge=0, lt=1e10)] = None
    start_at: Instant | None = None
    end_at: Instant | None = None
    max_runs: Annotated[int | None, Field(ge=1, le=2**53)] = None
    expires_after_seconds: Annotated[float | None, Field(gt=0, lt=1e10)] = None
    queue: Annotated[str | None, Field(min_length=1, max_length=100)] = None
    priority: Annotated[int | None, Field(ge=-32_768, le=32_767)] = None
    group: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    condition: Condition = None
    unless: UnlessIn | None = None
    target: Annotated[dict[str, Json] | Name | None, Field(description="Inline target, or the name of a target.")] = (
        None
    )
    on_unhandled: Literal["hold", "complete"] | None = None
    notify: Annotated[list[Annotated[str, Field(max_length=100)]] | None, Field(max_length=10)] = None
    enabled: bool | None = None
    metadata: dict[str, Json] | None = None
    labels: Labels | None = None


def parse_schedule(body: ScheduleIn, default_timezone: str | None) -> tuple[str, Spec, dict[str, Any]]:
    """Return topic, recurrence and options for `schedule_repeat`. Raises InvalidInput."""
    fields = {name: value for name, value in body.sent_fields().items() if value is not None}
    for alias, name in FIELD_ALIASES.items():
        if alias in fields:
            if name in fields:
                raise InvalidInput(
                    f"{_to_camel(alias)} is an alias of {name}; specify only one.", code="DUPLICATE_FIELD"
                )
            fields[name] = fields.pop(alias)
    if "topic" not in fields:
        raise InvalidInput("A schedule requires a topic.", code="TOPIC_MISSING", fix="Specify topic (or jobType).")
    if "max_retries" in fields and "retry" in fields:
        raise InvalidInput("retry and maxRetries cannot be combined; specify only one.", code="INVALID_RETRY")
    timezone = fields.get("timezone", default_timezone)
    spec = _parse_recurrence(fields, fields.pop("dst", {}))
    options = {name: fields.pop(name) for name in _UNCHANGED_OPTIONS if name in fields}
    options |= {option: fields.pop(name) for name, option in _OPTION_NAMES.items() if name in fields}
    for policy, value in fields.pop("catch_up", {}).items():
        if value is not None:
            options[_CATCH_UP_OPTIONS[policy]] = (
                _parse_duration(value, policy) if policy in ("window", "pace") else value
            )
    for bound, option in (("start_at", "start"), ("end_at", "end")):
        if bound in fields:
            options[option] = _parse_bound(fields.pop(bound), _to_camel(bound), timezone)
    options |= parse_metadata(fields.pop("metadata", {}))
    retry = fields.pop("retry", None)
    if "max_retries" in fields:
        retry = fields.pop("max_retries")
    if retry is not None:
        options["retry"] = parse_retry(retry)
    topic = fields.pop("topic")
    assert not fields, fields
    return topic, spec, options


_UNCHANGED_OPTIONS = (
    "name", "description", "timezone", "payload", "when_late", "calendar", "roll", "max_runs", "queue", "priority",
    "group", "condition", "unless", "target", "on_unhandled", "notify", "enabled", "labels",
)  # fmt: skip
_OPTION_NAMES = {
    "timeout_seconds": "timeout", "overlap_policy": "overlap", "missed_after_seconds": "missed_after",
    "tolerance_seconds": "tolerance", "jitter_seconds": "jitter", "expires_after_seconds": "expires_after",
}  # fmt: skip
_CATCH_UP_OPTIONS = {
    "policy": "catch_up", "window": "catch_up_window", "limit": "catch_up_limit", "pace": "catch_up_pace",
    "hold_above": "hold_above",
}  # fmt: skip


def _parse_recurrence(fields: dict[str, Any], dst: Mapping[str, Any]) -> Spec:
    """Remove the recurrence from the fields and parse it. Raises InvalidInput (RECURRENCE_MISSING)."""
    found = [name for name in RECURRENCE_FIELDS if name in fields]
    if len(found) != 1:
        specified = " and ".join(map(_to_camel, found))
        raise InvalidInput(
            f"{specified} cannot be combined; a schedule has one recurrence." if found
            else "The schedule has no recurrence.",
            code="RECURRENCE_MISSING", fix="Specify one of cronExpression, interval, rrule, dates, recurrence.",
        )  # fmt: skip
    (kind,), value = found, fields.pop(found[0])
    dst_options = {name: choice for name, choice in dst.items() if choice is not None}
    match kind:
        case "cron_expression":
            cron = parse_cron(value)
            return cron if not dst_options else Cron(cron.expression, **dst_options) if isinstance(cron, Cron) else cron
        case "interval":
            return _parse_interval(value, dst_options)
        case "rrule":
            return RRule(value.replace("\\n", "\n"), **dst_options)
        case "dates":
            return Dates([parse_instant(text, "a date") for text in value])
        case _:
            return spec_from_json(value)


def _parse_interval(value: Mapping[str, Any], dst: Mapping[str, Any]) -> Every:
    length, text, anchor = value.get("every_ms"), value.get("every"), value.get("anchor")
    if (length is None) == (text is None):
        raise InvalidInput(
            "An interval requires exactly one of everyMs and every.",
            code="INVALID_INTERVAL",
            fix='Specify e.g. {"everyMs": 900000}.',
        )
    if length is not None:
        text = f"PT{length // 1000}" + (f".{length % 1000:03d}".rstrip("0") if length % 1000 else "") + "S"
    at = None if anchor is None else parse_instant(anchor, "anchor")
    return Every(str(text), at, since=value.get("since"), **dst)


def _parse_duration(value: float | str, field: str) -> float:
    seconds = parse_duration(value)
    if seconds is None:
        raise InvalidInput(
            f"catchUp.{field} is {value!r:.60}, which is not a duration.", code="INVALID_DURATION",
            fix="Specify seconds or a duration, e.g. 3600 or 24h.",
        )  # fmt: skip
    return seconds


def _parse_bound(text: str, field: str, timezone: str | None) -> datetime:
    instant = parse_instant(text, field)
    return instant if instant.tzinfo is not None or timezone is None else resolve_local(instant, zone(timezone))[0]


def _to_camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(map(str.title, rest))


class ScheduleOut(ResponseBody):
    """Schedule with all its settings, including defaults."""

    warnings: Warnings = Field(default_factory=list)
    id: str
    tenant_id: str
    name: str
    description: str | None
    summary: Annotated[str, Field(description="Description of the recurrence in English.")]
    enabled: bool
    cron_expression: str | None
    interval: dict[str, Json] | None
    rrule: str | None
    dates: list[str] | None
    recurrence: Annotated[dict[str, Json], Field(description="Complete recurrence of any kind.")]
    timezone: str
    topic: str
    job_type: str
    payload: Json
    job_payload: Json
    max_retries: int
    retry: dict[str, Json]
    timeout_seconds: float
    overlap_policy: str
    catch_up: dict[str, Json]
    missed_after_seconds: float
    when_late: str
    tolerance_seconds: float
    dst: dict[str, str] | None
    calendar: str | None
    roll: str | None
    jitter_seconds: float
    start_at: Instant | None
    end_at: Instant | None
    max_runs: int | None
    expires_after_seconds: float | None
    queue: str
    priority: int
    group: str | None
    condition: list[ComparisonOut]
    unless: UnlessOut | None
    target: dict[str, Json] | None
    on_unhandled: str | None
    notify: list[str]
    metadata: dict[str, Json]
    labels: Labels
    overrides: list[dict[str, Json]]
    next_fire_at: Instant | None
    last_fired_at: Instant | None
    paused_at: Instant | None
    pause_reason: str | None
    error: str | None
    revision: int
    etag: Annotated[str, Field(description="ETag for If-Match.")]
    created_at: Instant
    updated_at: Instant
    created_by: str | None
    source: Annotated[
        str,
        Field(description="code if an application defines it in its source and saves it at startup, otherwise api."),
    ]
    recent: Annotated[
        list[str] | None, Field(description="Outcomes of its last runs, newest first; only in lists that request them.")
    ] = None


def render_definition(schedule: Schedule) -> dict[str, Any]:
    """Render the fields of `ScheduleIn` that recreate this schedule, without unset fields."""
    recurrence, action, policies = schedule.recurrence, schedule.action, schedule.policies
    spec = recurrence.spec
    fields: dict[str, Any] = {"name": schedule.name, "timezone": schedule.timezone, "topic": action.topic}
    if isinstance(spec, OnCalendar) and spec.calendar.name is not None:
        calendar = spec.calendar.name if spec.follows else f"{spec.calendar.name}@{spec.calendar.version}"
        fields |= {"calendar": calendar, "roll": spec.roll}
        spec = spec.spec
    fields |= _render_recurrence(spec) or {"recurrence": spec.to_json()}
    for name, value in (("startAt", recurrence.start), ("endAt", recurrence.end)):
        fields |= {name: format_utc(value)} if value is not None else {}
    optional = {
        "description": action.description, "payload": action.payload, "labels": action.labels or None,
        "metadata": metadata_json(action.metadata) or None, "maxRuns": recurrence.max_runs, "group": action.group,
        "condition": action.condition or None, "unless": action.unless,
        "timeoutSeconds": action.timeout, "expiresAfterSeconds": action.expires_after,
        "retry": None if action.retry is None else _render_retry(action.retry), **target_json(action.target),
    }  # fmt: skip
    fields |= {name: value for name, value in optional.items() if value is not None}
    return fields | {
        "queue": action.queue, "priority": action.priority, "overlapPolicy": policies.overlap.value,
        "catchUp": {
            "policy": policies.catch_up.value, "window": policies.catch_up_window, "limit": policies.catch_up_limit,
            "pace": policies.catch_up_pace, "holdAbove": policies.hold_above,
        },
        "missedAfterSeconds": policies.missed_after, "whenLate": policies.when_late.value,
        "toleranceSeconds": policies.tolerance, "jitterSeconds": policies.jitter, "notify": list(policies.notify),
    }  # fmt: skip


def _render_recurrence(spec: Spec) -> dict[str, Any]:
    """Render a recurrence as its shorthand field, or as {} if no shorthand expresses it completely."""
    fields = spec.to_fields()
    match spec:
        case Cron() if fields.keys() <= {"spec", "dst"}:
            return {"cronExpression": spec.expression, "dst": {"gap": spec.gap, "fold": spec.fold}}
        case Every() if "monthEnd" not in fields:
            step = spec.step
            is_elapsed = not (step.months or step.days or step.elapsed_us % 1000)
            length = {"everyMs": step.elapsed_us // 1000} if is_elapsed else {"every": spec.duration}
            rest = {"anchor": fields["anchor"], "since": spec.since}
            interval = length | {name: value for name, value in rest.items() if value is not None}
            return {"interval": interval} | ({"dst": fields["dst"]} if "dst" in fields else {})
        case Dates():
            return {"dates": [format_instant(instant) for instant in spec.dates]}
        case RRule() if not (spec.exdates or spec.rdates) and spec.month_end == "skip":
            start = fields["dtstart"]
            prefix = f"DTSTART:{re.sub('[-:]', '', start)}\nRRULE:" if start else ""
            return {"rrule": prefix + spec.text.removeprefix("RRULE:"), "dst": fields["dst"]}
    return {}


def _render_retry(retry: Retry) -> dict[str, Any]:
    return {
        "attempts": retry.attempts,
        "backoff": {"type": str(retry.backoff), "delay": retry.delay, "max": retry.max_delay, "jitter": retry.jitter},
    }


def etag(schedule: Schedule) -> str:
    """Return the strong ETag of a schedule. Each way to pause or resume it changes the ETag."""
    return entity_tag(schedule.revision, format_utc(schedule.paused_at), schedule.pause_reason)


def render_schedule(schedule: Schedule) -> dict[str, Any]:
    """Render a schedule as JSON."""
    definition = render_definition(schedule)
    retry = schedule.action.retry or Retry()
    empty = dict.fromkeys(field.alias or name for name, field in ScheduleOut.model_fields.items() if name != "warnings")
    return {
        **empty, **definition,
        "id": schedule.id, "tenantId": schedule.tenant_id, "summary": schedule.recurrence.describe(),
        "enabled": schedule.enabled, "recurrence": schedule.recurrence.spec.to_json(),
        "jobType": schedule.topic, "payload": schedule.action.payload, "jobPayload": schedule.action.payload,
        "maxRetries": retry.attempts - 1, "retry": _render_retry(retry),
        "timeoutSeconds": schedule.action.timeout or DEFAULT_TIMEOUT_SECONDS,
        "metadata": definition.get("metadata", {}),
        "labels": schedule.action.labels, "condition": schedule.action.condition,
        "overrides": [override.to_json() for override in schedule.recurrence.overrides],
        "nextFireAt": format_utc(schedule.effective_next_fire_at) if schedule.enabled else None,
        "lastFiredAt": format_utc(schedule.last_fired_at), "pausedAt": format_utc(schedule.paused_at),
        "pauseReason": schedule.pause_reason, "error": schedule.error, "revision": schedule.revision,
        "etag": etag(schedule),
        "createdAt": format_utc(schedule.created_at), "updatedAt": format_utc(schedule.updated_at),
        "createdBy": schedule.created_by, "source": "api" if schedule.code_hash is None else "code",
    }  # fmt: skip
