"""`/schedules`: made, read, changed by revision, steered."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError

from timebell.api.conditions import may_ask
from timebell.api.executions import ExecutionPage, execution
from timebell.api.job_fields import JobOut, RequestOut, shown_job
from timebell.api.route import Guarded, Let, changes, missing, reads
from timebell.api.schedule_fields import ALIASES, RECURRENCES, ScheduleIn, ScheduleOut, given_of, read, shown
from timebell.api.schemas import Body, Cursor, Id, Instant, Json, Limit, Shown, answer, aware, paged, utc
from timebell.client.validation import uuid_of
from timebell.engine.runner import UPCOMING
from timebell.errors import Conflict, InvalidInput, RevisionMissing, RevisionStale
from timebell.ids import occurrence_key
from timebell.model.schedule import Schedule
from timebell.recurrence.preview import dst_notes, next_fires
from timebell.store.audit import audit_log
from timebell.store.schedules import actions
from timebell.store.schedules import schedules as rows
from timebell.tenancy.roles import Role

YEAR = timedelta(days=366)
routes = APIRouter(route_class=Guarded, tags=["schedules"])
Match = Annotated[str | None, Header(alias="If-Match", max_length=200, description="The ETag of what is changed.")]


class SchedulePage(Shown):
    """Schedules, newest first."""

    items: list[ScheduleOut]
    next_cursor: str | None


class Fire(Shown):
    """An instant at which it fires."""

    utc: Instant
    local: str
    note: str | None


class Preview(Shown):
    """What a schedule would do."""

    description: str
    next: list[Fire]
    notes: list[str]
    schedule: Annotated[ScheduleOut, Field(description="What would be written, defaults filled in.")]
    request: Annotated[RequestOut | None, Field(description="What its target will be sent; null for handlers.")]


class Fires(Shown):
    """What comes next."""

    items: list[Fire]


class Revisions(Shown):
    """Every revision, newest first, with what it was made with."""

    items: list[dict[str, Json]]


class Backfilled(Shown):
    """What a backfill makes."""

    dry_run: bool
    instants: list[Instant]
    made: int
    kept: Annotated[int, Field(description="Occurrences that have run already, and are not repeated.")]


class Deleted(Shown):
    """What became of its jobs."""

    prevented: int
    in_flight: int


class PauseIn(Body):
    reason: Annotated[str | None, Field(min_length=1, max_length=500)] = None


class ResumeIn(Body):
    catch_up: bool = False


class BackfillIn(Body):
    from_: Annotated[Instant, Field(alias="from")]
    to: Instant
    overlap_policy: Annotated[str | None, Field(max_length=20)] = None
    dry_run: bool = False


class RevertIn(Body):
    revision: Annotated[int, Field(ge=1, le=2**31 - 1)]


class OverrideIn(Body):
    at: Instant
    action: Annotated[str, Field(pattern="^(skip|move)$")]
    to: Instant | None = None


class UndoIn(Body):
    at: Instant


async def find(let: Let, id_: str) -> Schedule:
    """The caller's schedule. Raises NotFound."""
    known = uuid_of(id_)
    found: Schedule | None = None if known is None else await let.run(rows.find, let.tenant_id, id_=known)
    if found is None:
        raise missing("schedule", id_)
    return found


async def expect(let: Let, id_: str, match: str | None) -> Schedule:
    """The schedule, locked for this change, if it is still what the caller has read.

    Raises NotFound, RevisionMissing, RevisionStale.
    """
    known = uuid_of(id_)
    found: Schedule | None = None if known is None else await let.run(actions.locked, let.tenant_id, known)
    if found is None:
        raise missing("schedule", id_)
    let.subject, let.before = found.id, shown(found)
    if match is None:
        raise RevisionMissing(
            "A change has to say of which revision.",
            fix=f"Send If-Match: {etag(found)} (or *, to overwrite whatever is).",
        )
    if match != "*" and etag(found) not in [one.strip().removeprefix("W/") for one in match.split(",")]:
        last = await let.run(audit_log.page, let.tenant_id, 1, None, subject=found.id)
        who = "".join(f" {one.actor} changed it last, at {utc(one.at)} ({one.action})." for one in last)
        raise RevisionStale(
            f"{found.name} is at revision {found.revision}, and the change is of {match:.40}.{who}", existing=found.id,
            fix="Read it again, and change that.",
        )  # fmt: skip
    return found


def etag(schedule: Schedule) -> str:
    """The strong ETag of a schedule: its revision."""
    return f'"{schedule.revision}"'


def one(schedule: Schedule, status: int = 200) -> Response:
    """A schedule as a response."""
    headers = {"ETag": etag(schedule)} | ({"Location": f"/api/v1/schedules/{schedule.id}"} if status == 201 else {})
    return answer(shown(schedule), status, headers)


async def _write(let: Let, body: ScheduleIn, *, replace: bool) -> Schedule:
    topic, spec, options = read(body, let.app.settings.default_timezone)
    if "name" not in options:
        raise InvalidInput("A schedule has to say its name.", code="NAME_MISSING", fix='Give "name".')
    if options.setdefault("tenant_id", let.tenant_id) != let.tenant_id:
        raise missing("tenant", options["tenant_id"])
    may_ask(let, body.unless)
    options["created_by"] = let.caller.actor
    enabled = options.pop("enabled", True)
    made = await let.app.schedule_repeat(
        topic, spec, replace=replace, connection=let.connection, enabled=enabled, **options
    )
    if replace and made.enabled != enabled and body.enabled is not None:
        steer = steer_on if enabled else steer_off
        made = await steer(let, made.id)
    let.subject = made.id
    return made


async def steer_on(let: Let, id_: str, catch_up: bool = False) -> Schedule:
    """Resume it."""
    return await let.app.schedules.resume(id_, catch_up=catch_up, tenant_id=let.tenant_id, connection=let.connection)


async def steer_off(let: Let, id_: str, reason: str | None = None) -> Schedule:
    """Pause it."""
    return await let.app.schedules.pause(id_, reason, tenant_id=let.tenant_id, connection=let.connection)


@routes.post("/schedules", status_code=201, response_model=ScheduleOut, **changes("schedule.create", Role.EDITOR))
async def create_schedule(body: ScheduleIn, let: Let) -> Response:
    """Make a schedule."""
    return one(await _write(let, body, replace=False), 201)


@routes.get("/schedules", response_model=SchedulePage, **reads())
async def list_schedules(
    let: Let, limit: Limit = 50, cursor: Cursor = None,
    enabled: bool | None = None, name: Annotated[str | None, Query(max_length=200)] = None,
    contains: Annotated[str | None, Query(max_length=200, description="Part of the name, in any case.")] = None,
    topic: Annotated[str | None, Query(max_length=200)] = None,
    job_type: Annotated[str | None, Query(alias="jobType", max_length=200)] = None,
    label: Annotated[list[str] | None, Query(max_length=32, description="name=value; all must match.")] = None,
    tenant: Annotated[str | None, Query(max_length=200, description="For keys of the platform.")] = None,
    recent: Annotated[int, Query(ge=0, le=28, description="Tell what the last so many runs became.")] = 0,
) -> Response:  # fmt: skip
    """A page of schedules, newest first."""
    labels = {}
    for text in label or []:
        key, equals, value = text.partition("=")
        if not equals or '"' in key:
            raise InvalidInput(f"label is {text!r:.60}.", code="INVALID_LABELS", fix="Write it like team=billing.")
        labels[key] = value
    page = await let.app.schedules.list(
        let.tenant_id,
        limit,
        cursor,
        name=name,
        enabled=enabled,
        topic=topic or job_type,
        labels=labels,
        contains=contains,
    )
    ended = await let.run(rows.recent, [found.id for found in page], recent) if recent else {}
    return paged(page, [shown(found) | {"recent": ended.get(found.id, []) if recent else None} for found in page])


@routes.post("/schedules/preview", response_model=Preview, **reads())
async def preview_schedule(body: ScheduleIn, let: Let, count: Annotated[int, Query(ge=1, le=1000)] = 10) -> Response:
    """What a schedule with this body would do; nothing is written."""
    topic, spec, options = read(body, let.app.settings.default_timezone)
    options |= {"tenant_id": let.tenant_id}
    calendar = await let.app.schedules.calendar_of(options)
    since = await let.app.schedules.since(options)
    draft = let.app.schedules.draft(topic, spec, options, let.now, since, calendar)
    return answer({
        "description": draft.recurrence.describe(), "next": next_fires(draft.recurrence, let.now, count),
        "notes": [*spec.warnings(), *dst_notes(draft.recurrence, let.now, let.now + YEAR)],
        "schedule": shown(draft), "request": _request(let, draft),
    })  # fmt: skip


def _request(let: Let, draft: Schedule) -> dict[str, Any] | None:
    """What the first occurrence of a schedule would send."""
    recurrence, at = draft.recurrence, draft.next_fire_at or let.now
    upcoming: list[datetime] = []
    while len(upcoming) < UPCOMING and (following := recurrence.next(upcoming[-1] if upcoming else at)) is not None:
        upcoming.append(following)
    return let.app.request_of(
        draft.action.target, tenant_id=draft.tenant_id, topic=draft.topic, payload=draft.action.payload,
        metadata=draft.action.metadata, timezone=draft.timezone, scheduled_at=at, fired_at=at, schedule_id=draft.id,
        schedule_name=draft.name, occurrence_key=occurrence_key(draft.id, at), upcoming=upcoming,
    )  # fmt: skip


@routes.put(
    "/schedules/by-name/{name}", response_model=ScheduleOut, responses={201: {"model": ScheduleOut}},
    **changes("schedule.put", Role.EDITOR),
)  # fmt: skip
async def put_schedule(
    name: Id, body: ScheduleIn, let: Let, if_match: Match = None,
    if_none_match: Annotated[str | None, Header(alias="If-None-Match", max_length=200)] = None,
) -> Response:  # fmt: skip
    """Make a schedule of this name, or make the one there is this one: what the body leaves out is the default."""
    if body.name not in (None, name):
        raise InvalidInput("The name in the body is another than in the path.", code="NAME_DIFFERS")
    found: Schedule | None = await let.run(rows.find, let.tenant_id, name=name)
    if found is not None and if_none_match == "*":
        raise Conflict(f"There is a schedule {name!r} already.", code="SCHEDULE_EXISTS", existing=found.id)
    if found is not None:
        await expect(let, found.id, if_match)
    made = await _write(let, body.model_copy(update={"name": name}), replace=True)
    return one(made, 201 if found is None else 200)


@routes.get("/schedules/{id}", response_model=ScheduleOut, **reads())
async def get_schedule(id: Id, let: Let) -> Response:
    """One schedule."""
    return one(await find(let, id))


@routes.patch("/schedules/{id}", response_model=ScheduleOut, **changes("schedule.update", Role.EDITOR))
async def patch_schedule(id: Id, patch: dict[str, Json], let: Let, if_match: Match = None) -> Response:
    """Change some of it (RFC 7396 merge patch: null takes a field back to its default)."""
    found = await expect(let, id, if_match)
    body = _fitting(_merged(given_of(found), patch))
    if body.name != found.name:
        raise InvalidInput("A schedule keeps its name.", code="NAME_DIFFERS", fix="Make another one.")
    return one(await _write(let, body, replace=True))


def _fitting(merged: dict[str, Any]) -> ScheduleIn:
    """As FastAPI reads a body. Raises RequestValidationError."""
    try:
        return ScheduleIn.model_validate(merged)
    except ValidationError as unfit:
        raise RequestValidationError([{**error, "loc": ("body", *error["loc"])} for error in unfit.errors()]) from unfit


def _merged(given: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """The fields of a schedule with a merge patch on them; one recurrence takes the place of another."""
    names = {"jobType": "topic", "jobPayload": "payload"}
    assert set(names.values()) == set(ALIASES.values())
    patch = {names.get(name, name): value for name, value in patch.items()}
    kinds = {"cronExpression", *RECURRENCES[1:]}
    if kinds & {name for name, value in patch.items() if value is not None}:
        given = {name: value for name, value in given.items() if name not in kinds and name != "dst"}
    if "maxRetries" in patch:
        given.pop("retry", None)
    merged: dict[str, Any] = _merge(given, patch)
    merged.setdefault("name", given["name"])
    return merged


def _merge(into: Any, patch: Any) -> Any:
    """RFC 7396, section 2; a payload is a value, and replaced whole."""
    if not isinstance(patch, dict):
        return patch
    result = dict(into) if isinstance(into, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = (
                value if name in ("payload", "target", "retry", "condition") else _merge(result.get(name), value)
            )
    return result


@routes.delete("/schedules/{id}", response_model=Deleted, **changes("schedule.delete", Role.EDITOR))
async def delete_schedule(id: Id, let: Let, if_match: Match = None) -> Response:
    """Forget it: jobs that wait are cancelled, those that run are not tried again, history stays."""
    await expect(let, id, if_match)
    swept = await let.app.schedules.delete(id, tenant_id=let.tenant_id, connection=let.connection)
    return answer({"prevented": swept.prevented, "inFlight": swept.in_flight})


@routes.post("/schedules/{id}/pause", response_model=ScheduleOut, **changes("schedule.pause", Role.OPERATOR))
async def pause_schedule(id: Id, let: Let, body: PauseIn | None = None) -> Response:
    """Fire nothing until it is resumed."""
    await _before(let, id)
    return one(await steer_off(let, id, body.reason if body else None))


@routes.post("/schedules/{id}/resume", response_model=ScheduleOut, **changes("schedule.resume", Role.OPERATOR))
async def resume_schedule(id: Id, let: Let, body: ResumeIn | None = None) -> Response:
    """Fire again; with catchUp, what fell into the pause is decided by the schedule's catch-up."""
    await _before(let, id)
    return one(await steer_on(let, id, body.catch_up if body else False))


@routes.post(
    "/schedules/{id}/trigger", status_code=201, response_model=JobOut, **changes("schedule.trigger", Role.OPERATOR)
)
async def trigger_schedule(id: Id, let: Let) -> Response:
    """One more run, now: it obeys overlap and moves nothing."""
    await _before(let, id)
    job = await let.app.schedules.trigger(id, tenant_id=let.tenant_id, connection=let.connection)
    return answer(shown_job(job), 201, {"Location": f"/api/v1/jobs/{job.id}"})


@routes.post("/schedules/{id}/backfill", response_model=Backfilled, **changes("schedule.backfill", Role.OPERATOR))
async def backfill_schedule(id: Id, body: BackfillIn, let: Let) -> Response:
    """Run what was skipped or never was; with dryRun, only say what that is."""
    await _before(let, id)
    found = await let.app.schedules.backfill(
        id, aware(body.from_, "from"), aware(body.to, "to"), overlap=body.overlap_policy, dry_run=body.dry_run,
        tenant_id=let.tenant_id, connection=let.connection,
    )  # fmt: skip
    return answer({
        "dryRun": body.dry_run, "instants": [utc(at) for at in found.instants],
        "made": 0 if body.dry_run else len(found.instants), "kept": found.kept,
    })  # fmt: skip


@routes.post("/schedules/{id}/skip-next", response_model=ScheduleOut, **changes("schedule.skip_next", Role.OPERATOR))
async def skip_next(id: Id, let: Let) -> Response:
    """Leave out the next occurrence: it becomes a row `skipped`, reason `override`."""
    found = await _before(let, id)
    if found.fires_at is None:
        raise Conflict(f"{found.name} does not fire any more.", code="NOTHING_TO_SKIP", existing=found.id)
    return one(await let.app.schedules.skip(id, found.fires_at, tenant_id=let.tenant_id, connection=let.connection))


@routes.post("/schedules/{id}/overrides", response_model=ScheduleOut, **changes("schedule.override", Role.OPERATOR))
async def override_occurrence(id: Id, body: OverrideIn, let: Let) -> Response:
    """Skip or move one occurrence, named by its nominal instant."""
    await _before(let, id)
    at, verbs = aware(body.at, "at"), let.app.schedules
    shared: dict[str, Any] = {"tenant_id": let.tenant_id, "connection": let.connection}
    if (body.action == "move") != (body.to is not None):
        raise InvalidInput("to belongs to move.", code="INVALID_OVERRIDE", fix="Give it with move, leave it with skip.")
    if body.to is None:
        return one(await verbs.skip(id, at, **shared))
    return one(await verbs.move(id, at, aware(body.to, "to"), **shared))


@routes.delete("/schedules/{id}/overrides", response_model=ScheduleOut, **changes("schedule.undo", Role.OPERATOR))
async def undo_override(id: Id, let: Let, at: Annotated[str, Query(max_length=64)]) -> Response:
    """Take back a skip or a move whose nominal instant is still to come."""
    await _before(let, id)
    undone = let.app.schedules.undo(id, aware(at, "at"), tenant_id=let.tenant_id, connection=let.connection)
    return one(await undone)


@routes.post("/schedules/{id}/revert", response_model=ScheduleOut, **changes("schedule.revert", Role.EDITOR))
async def revert_schedule(id: Id, body: RevertIn, let: Let) -> Response:
    """Make it again what it was at a revision."""
    await _before(let, id)
    reverted = let.app.schedules.revert(id, body.revision, tenant_id=let.tenant_id, connection=let.connection)
    return one(await reverted)


@routes.get("/schedules/{id}/executions", response_model=ExecutionPage, **reads())
async def list_executions(
    id: Id, let: Let, limit: Limit = 20, cursor: Cursor = None,
    status: Annotated[list[Annotated[str, Query(max_length=20)]] | None, Query(max_length=20)] = None,
) -> Response:  # fmt: skip
    """What became of its occurrences, newest first."""
    await find(let, id)
    page = await let.app.list(schedule_id=id, tenant_id=let.tenant_id, status=status, limit=limit, cursor=cursor)
    return paged(page, [execution(job) for job in page])


@routes.get("/schedules/{id}/next", response_model=Fires, **reads())
async def next_occurrences(
    id: Id, let: Let, count: Annotated[int, Query(ge=1, le=1000)] = 10,
    from_: Annotated[str | None, Query(alias="from", max_length=64)] = None,
) -> Response:  # fmt: skip
    """When it fires next: pauses left aside, overrides applied."""
    found = await find(let, id)
    after = let.now if from_ is None else aware(from_, "from")
    return answer({"items": next_fires(found.recurrence.fired(), after, count)})


@routes.get("/schedules/{id}/revisions", response_model=Revisions, **reads())
async def list_revisions(id: Id, let: Let) -> Response:
    """Every revision, the newest first; also of a schedule that was deleted."""
    revisions = await let.app.schedules.history(id, tenant_id=let.tenant_id)
    return answer({"items": [_revision(revision) for revision in revisions]})


def _revision(revision: Any) -> dict[str, Any]:
    what = Schedule(
        id="", tenant_id="", name="", recurrence=revision.recurrence, action=revision.action,
        policies=revision.policies, created_at=revision.effective_at, updated_at=revision.effective_at,
    )  # fmt: skip
    given = given_of(what)
    del given["name"]
    return {
        "revision": revision.number, "effectiveAt": utc(revision.effective_at),
        "summary": revision.recurrence.describe(), **given,
    }  # fmt: skip


async def _before(let: Let, id_: str) -> Schedule:
    """The schedule, locked, and kept for the audit record. Raises NotFound."""
    return await expect(let, id_, "*")
