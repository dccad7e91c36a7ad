"""A schedule as JSON: what is sent to make one, and how it is shown. Both have the same names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from timebell.api.conditions import ComparisonOut, Condition, UnlessIn, UnlessOut
from timebell.api.schemas import Body, Instant, Json, Name, Shown, utc
from timebell.client.job_fields import labels_of, metadata_json, retry_of, target_json
from timebell.errors import InvalidInput
from timebell.model.policy import Retry
from timebell.model.schedule import Schedule
from timebell.recurrence import Cron, Dates, Every, OnCalendar, RRule, Spec, parse_cron, resolve_local, zone
from timebell.recurrence.codec import spec_from_json, spec_to_json
from timebell.recurrence.instants import format_instant, parse_instant
from timebell.settings import duration

TIMEOUT = 3600.0  # seconds, of an occurrence that says nothing else
RECURRENCES = ("cron_expression", "interval", "rrule", "dates", "recurrence")
ALIASES = {"job_type": "topic", "job_payload": "payload"}
Seconds = Annotated[float | str, Field(description="Seconds, or a duration such as 90s, 15m, 24h.")]
Labels = dict[str, str]


class Interval(Body):
    """A fixed interval: `everyMs` of real time, or `every` as ISO 8601 (P1M keeps the local time)."""

    every_ms: Annotated[int | None, Field(ge=1, le=10**13)] = None
    every: Annotated[str | None, Field(max_length=64)] = None
    anchor: Instant | None = None
    since: Literal["last_end", "last_start"] | None = None


class Dst(Body):
    """What becomes of local times that the clock skips or repeats."""

    gap: Literal["end", "shift", "skip"] | None = None
    fold: Literal["first", "last", "both"] | None = None


class CatchUpIn(Body):
    """What becomes of missed occurrences."""

    policy: Literal["latest", "all", "skip"] | None = None
    window: Seconds | None = None
    limit: Annotated[int | None, Field(ge=0, le=10**6)] = None
    pace: Seconds | None = None
    hold_above: Annotated[int | None, Field(ge=0, le=10**9)] = None


class ScheduleIn(Body):
    """What makes a schedule: a name, one recurrence, a topic, and whatever differs from the defaults."""

    name: Name | None = None
    description: Annotated[str | None, Field(max_length=2000)] = None
    cron_expression: Annotated[str | None, Field(max_length=256)] = None
    interval: Interval | None = None
    rrule: Annotated[str | None, Field(max_length=20_000)] = None
    dates: Annotated[list[Instant] | None, Field(max_length=10_000)] = None
    recurrence: dict[str, Json] | None = None
    timezone: Annotated[str | None, Field(max_length=64)] = None
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
    class_: Annotated[Literal["state", "anchored"] | None, Field(alias="class")] = None
    tolerance_seconds: Annotated[float | None, Field(ge=0, lt=1e10)] = None
    dst: Dst | None = None
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
    target: Annotated[dict[str, Json] | Name | None, Field(description="Or the name of a target.")] = None
    unheard: Literal["hold", "complete"] | None = None
    notify: Annotated[list[Annotated[str, Field(max_length=100)]] | None, Field(max_length=10)] = None
    enabled: bool | None = None
    metadata: dict[str, Json] | None = None
    labels: Labels | None = None


def read(body: ScheduleIn, default_timezone: str | None) -> tuple[str, Spec, dict[str, Any]]:
    """Topic, recurrence and options for `schedule_repeat`. Raises InvalidInput."""
    given = {name: value for name, value in body.given().items() if value is not None}
    for alias, name in ALIASES.items():
        if alias in given:
            if name in given:
                raise InvalidInput(f"{_camel(alias)} and {name} say the same: give one.", code="FIELD_TWICE")
            given[name] = given.pop(alias)
    if "topic" not in given:
        raise InvalidInput("A schedule has to say its topic.", code="TOPIC_MISSING", fix="Give topic (or jobType).")
    if "max_retries" in given and "retry" in given:
        raise InvalidInput("retry and maxRetries say the same: give one.", code="INVALID_RETRY")
    named = given.get("timezone", default_timezone)
    spec = _spec(given, given.pop("dst", {}))
    options = {name: given.pop(name) for name in _SAME if name in given}
    options |= {ours: given.pop(theirs) for theirs, ours in _RENAMED.items() if theirs in given}
    for policy, value in given.pop("catch_up", {}).items():
        if value is not None:
            options[_CATCH_UP[policy]] = _seconds(value, policy) if policy in ("window", "pace") else value
    for bound, option in (("start_at", "start"), ("end_at", "end")):
        if bound in given:
            options[option] = _bound(given.pop(bound), _camel(bound), named)
    options |= labels_of(given.pop("metadata", {}))
    retry = given.pop("retry", None)
    if "max_retries" in given:
        retry = given.pop("max_retries")
    if retry is not None:
        options["retry"] = retry_of(retry)
    topic = given.pop("topic")
    assert not given, given
    return topic, spec, options


_SAME = (
    "name", "description", "timezone", "payload", "class_", "calendar", "roll", "max_runs", "queue", "priority",
    "group", "condition", "unless", "target", "unheard", "notify", "enabled", "labels",
)  # fmt: skip
_RENAMED = {
    "timeout_seconds": "timeout", "overlap_policy": "overlap", "missed_after_seconds": "missed_after",
    "tolerance_seconds": "tolerance", "jitter_seconds": "jitter", "expires_after_seconds": "expires_after",
}  # fmt: skip
_CATCH_UP = {
    "policy": "catch_up", "window": "catch_up_window", "limit": "catch_up_limit", "pace": "catch_up_pace",
    "hold_above": "hold_above",
}  # fmt: skip


def _spec(given: dict[str, Any], dst: Mapping[str, Any]) -> Spec:
    """The one recurrence among the fields, taken out of them. Raises InvalidInput (RECURRENCE_MISSING)."""
    found = [name for name in RECURRENCES if name in given]
    if len(found) != 1:
        said = " and ".join(map(_camel, found))
        raise InvalidInput(
            f"{said} are given, and a schedule has one." if found else "Nothing says when it fires.",
            code="RECURRENCE_MISSING", fix="Give one of cronExpression, interval, rrule, dates, recurrence.",
        )  # fmt: skip
    (kind,), value = found, given.pop(found[0])
    jumps = {name: word for name, word in dst.items() if word is not None}
    match kind:
        case "cron_expression":
            cron = parse_cron(value)
            return cron if not jumps else Cron(cron.expression, **jumps) if isinstance(cron, Cron) else cron
        case "interval":
            return _interval(value, jumps)
        case "rrule":
            return RRule(value.replace("\\n", "\n"), **jumps)
        case "dates":
            return Dates([parse_instant(text, "a date") for text in value])
        case _:
            return spec_from_json(value)


def _interval(value: Mapping[str, Any], jumps: Mapping[str, Any]) -> Every:
    length, text, anchor = value.get("every_ms"), value.get("every"), value.get("anchor")
    if (length is None) == (text is None):
        raise InvalidInput(
            "An interval has everyMs or every.", code="INVALID_INTERVAL", fix='E.g. {"everyMs": 900000}.'
        )
    if length is not None:
        text = f"PT{length // 1000}" + (f".{length % 1000:03d}".rstrip("0") if length % 1000 else "") + "S"
    at = None if anchor is None else parse_instant(anchor, "anchor")
    return Every(str(text), at, since=value.get("since"), **jumps)


def _seconds(value: float | str, field: str) -> float:
    found = duration(value)
    if found is None:
        raise InvalidInput(f"catchUp.{field} is {value!r:.60}.", code="INVALID_DURATION", fix="E.g. 3600, or 24h.")
    return found


def _bound(text: str, field: str, timezone: str | None) -> datetime:
    found = parse_instant(text, field)
    return found if found.tzinfo is not None or timezone is None else resolve_local(found, zone(timezone))[0]


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(map(str.title, rest))


class ScheduleOut(Shown):
    """A schedule, with everything it was made with, defaults filled in."""

    id: str
    tenant_id: str
    name: str
    description: str | None
    summary: Annotated[str, Field(description="When it fires, in English.")]
    enabled: bool
    cron_expression: str | None
    interval: dict[str, Json] | None
    rrule: str | None
    dates: list[str] | None
    recurrence: Annotated[dict[str, Json], Field(description="The whole rule, of whatever kind.")]
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
    class_: Annotated[str, Field(alias="class")]
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
    unheard: str | None
    notify: list[str]
    metadata: dict[str, Json]
    labels: Labels
    overrides: list[dict[str, Json]]
    next_fire_at: Instant | None
    last_fired_at: Instant | None
    paused_at: Instant | None
    pause_reason: str | None
    fault: str | None
    revision: int
    created_at: Instant
    updated_at: Instant
    created_by: str | None
    source: Annotated[str, Field(description="code, if an app defines it and writes it at its start; else api.")]
    recent: Annotated[
        list[str] | None, Field(description="Of a list asked for it: what its last runs became, newest first.")
    ] = None


def given_of(schedule: Schedule) -> dict[str, Any]:
    """What makes this schedule again, as `ScheduleIn` has it; what was left out stays out."""
    recurrence, action, policies = schedule.recurrence, schedule.action, schedule.policies
    spec = recurrence.spec
    given: dict[str, Any] = {"name": schedule.name, "timezone": schedule.timezone, "topic": action.topic}
    if isinstance(spec, OnCalendar) and spec.calendar.name is not None:
        named = spec.calendar.name if spec.follows else f"{spec.calendar.name}@{spec.calendar.version}"
        given |= {"calendar": named, "roll": spec.roll}
        spec = spec.spec
    given |= _simple(spec) or {"recurrence": spec_to_json(spec)}
    for name, value in (("startAt", recurrence.start), ("endAt", recurrence.end)):
        given |= {name: utc(value)} if value is not None else {}
    plain = {
        "description": action.description, "payload": action.payload, "labels": action.labels or None,
        "metadata": metadata_json(action.metadata) or None, "maxRuns": recurrence.max_runs, "group": action.group,
        "condition": action.condition or None, "unless": action.unless,
        "timeoutSeconds": action.timeout, "expiresAfterSeconds": action.expires_after,
        "retry": None if action.retry is None else _retry_json(action.retry), **target_json(action.target),
    }  # fmt: skip
    given |= {name: value for name, value in plain.items() if value is not None}
    return given | {
        "queue": action.queue, "priority": action.priority, "overlapPolicy": policies.overlap.value,
        "catchUp": {
            "policy": policies.catch_up.value, "window": policies.catch_up_window, "limit": policies.catch_up_limit,
            "pace": policies.catch_up_pace, "holdAbove": policies.hold_above,
        },
        "missedAfterSeconds": policies.missed_after, "class": policies.lateness.value,
        "toleranceSeconds": policies.tolerance, "jitterSeconds": policies.jitter, "notify": list(policies.notify),
    }  # fmt: skip


def _simple(spec: Spec) -> dict[str, Any]:
    """A recurrence in the fields that people write, where they say all of it; else nothing."""
    fields = spec.fields()
    match spec:
        case Cron() if fields.keys() <= {"spec", "dst"}:
            return {"cronExpression": spec.expression, "dst": {"gap": spec.gap, "fold": spec.fold}}
        case Every() if "monthEnd" not in fields:
            step = spec.step
            real = not (step.months or step.days or step.elapsed % 1000)
            length = {"everyMs": step.elapsed // 1000} if real else {"every": spec.duration}
            rest = {"anchor": fields["anchor"], "since": spec.since}
            interval = length | {name: value for name, value in rest.items() if value is not None}
            return {"interval": interval} | ({"dst": fields["dst"]} if "dst" in fields else {})
        case Dates():
            return {"dates": [format_instant(one) for one in spec.dates]}
        case RRule() if not (spec.exdates or spec.rdates) and spec.month_end == "skip":
            start = fields["dtstart"]
            first = f"DTSTART:{re.sub('[-:]', '', start)}\nRRULE:" if start else ""
            return {"rrule": first + spec.text.removeprefix("RRULE:"), "dst": fields["dst"]}
    return {}


def _retry_json(retry: Retry) -> dict[str, Any]:
    return {
        "attempts": retry.attempts,
        "backoff": {"type": str(retry.backoff), "delay": retry.delay, "max": retry.max_delay, "jitter": retry.jitter},
    }


def shown(schedule: Schedule) -> dict[str, Any]:
    """A schedule as it is answered."""
    given = given_of(schedule)
    retry = schedule.action.retry or Retry()
    empty = dict.fromkeys(field.alias or name for name, field in ScheduleOut.model_fields.items())
    return {
        **empty, **given,
        "id": schedule.id, "tenantId": schedule.tenant_id, "summary": schedule.recurrence.describe(),
        "enabled": schedule.enabled, "recurrence": spec_to_json(schedule.recurrence.spec),
        "jobType": schedule.topic, "payload": schedule.action.payload, "jobPayload": schedule.action.payload,
        "maxRetries": retry.attempts - 1, "retry": _retry_json(retry),
        "timeoutSeconds": schedule.action.timeout or TIMEOUT, "metadata": given.get("metadata", {}),
        "labels": schedule.action.labels, "condition": schedule.action.condition,
        "overrides": [one.to_json() for one in schedule.recurrence.overrides],
        "nextFireAt": utc(schedule.fires_at) if schedule.enabled else None,
        "lastFiredAt": utc(schedule.last_fired_at), "pausedAt": utc(schedule.paused_at),
        "pauseReason": schedule.pause_reason, "fault": schedule.fault, "revision": schedule.revision,
        "createdAt": utc(schedule.created_at), "updatedAt": utc(schedule.updated_at),
        "createdBy": schedule.created_by, "source": "api" if schedule.code_hash is None else "code",
    }  # fmt: skip
