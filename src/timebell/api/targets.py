"""`/targets`: where jobs go, under a name: made, changed, tested, signed with secrets that rotate."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field, SecretStr

from timebell.api.route import Guarded, Let, changes, missing, reads, record
from timebell.api.schemas import Body, Cursor, Id, Instant, Json, Limit, Name, Shown, answer, paged, utc
from timebell.client.targets import LONGEST_OVERLAP, OVERLAP, Tested
from timebell.model.target import NamedTarget, secret_names
from timebell.store.tenancy import targets as rows
from timebell.tenancy.roles import Role, require

routes = APIRouter(route_class=Guarded, tags=["targets"])
TEST = "target.test"
Options = Annotated[
    dict[str, Json],
    Field(description='As in an inline target; any of them may be {"secret": "name"}, which takes the role admin.'),
]
Signing = Annotated[
    SecretStr | None, Field(max_length=200, description="whsec_...; one is made if none is given. Of kind http.")
]


class TargetPut(Body):
    """What a target is."""

    kind: Annotated[str, Field(max_length=20)]
    options: Options
    signing_secret: Signing = None


class TargetIn(TargetPut):
    """What makes a target."""

    name: Name


class RotateIn(Body):
    """How to rotate."""

    signing_secret: Signing = None
    overlap_seconds: Annotated[
        float, Field(ge=0, le=LONGEST_OVERLAP, description="For so long the old one signs too.")
    ] = OVERLAP.total_seconds()


class SigningOut(Shown):
    """A signing secret that counts; itself it is not shown."""

    until: Annotated[Instant | None, Field(description="When it ends; null for the newest.")]


class TargetOut(Shown):
    """A target. Secrets are in it by name alone."""

    name: str
    tenant_id: str
    kind: str
    options: dict[str, Json]
    signing: Annotated[list[SigningOut], Field(description="What signs a request now, the newest first.")]
    revision: int
    disabled_at: Instant | None
    disabled_reason: str | None
    created_at: Instant
    created_by: str | None
    updated_at: Instant


class TargetMade(TargetOut):
    """A target whose signing secret was just made."""

    signing_secret: Annotated[
        str | None, Field(description="Shown this once; null if it is kept, or a repeated request is answered.")
    ]


class TargetPage(Shown):
    """Targets, by name."""

    items: list[TargetOut]
    next_cursor: str | None


class Sent(Shown):
    """What went out. Values of secrets are masked."""

    method: str
    url: str
    headers: dict[str, str]
    body: str


class TestOut(Shown):
    """What a test came to."""

    delivered: bool
    latency_ms: int
    error_code: str | None
    error_message: str | None
    response: Annotated[Json, Field(description="As it is kept with a job: of http, status and body.")]
    request: Annotated[Sent | dict[str, Json] | None, Field(description="What went out; secrets are masked.")]


@routes.post("/targets", status_code=201, response_model=TargetMade, **changes("target.create", Role.EDITOR))
async def create_target(body: TargetIn, let: Let) -> Response:
    """Make a target. Jobs and schedules name it: `"target": "orders"`."""
    made = await _put(let, body.name, body, replace=False)
    return _once(let, made, 201, {"Location": f"/api/v1/targets/{made.name}"})


@routes.get("/targets", response_model=TargetPage, **reads())
async def list_targets(let: Let, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """Targets by name."""
    page = await let.run(rows.page, let.tenant_id, limit, cursor, let.now)
    return paged(page, [shown(target) for target in page])


@routes.get("/targets/{name}", response_model=TargetOut, **reads())
async def get_target(name: Id, let: Let) -> Response:
    """One target."""
    found = await _find(let, name)
    return answer(shown(found), headers={"ETag": f'"{found.revision}"'})


@routes.put("/targets/{name}", response_model=TargetMade, **changes("target.put", Role.EDITOR))
async def put_target(name: Id, body: TargetPut, let: Let) -> Response:
    """Make a target, or give the one there is other options: jobs that are scheduled already go where it says then."""
    known: NamedTarget | None = await let.run(rows.find, let.tenant_id, name, let.now)
    let.before = None if known is None else shown(known)
    return _once(let, await _put(let, name, body, replace=True))


@routes.delete("/targets/{name}", response_model=TargetOut, **changes("target.delete", Role.EDITOR))
async def delete_target(name: Id, let: Let) -> Response:
    """Forget a target that no schedule and no pending job names."""
    let.subject, let.before = name, shown(await _find(let, name))
    return answer(shown(await let.app.targets.delete(name, tenant_id=let.tenant_id, connection=let.connection)))


@routes.post("/targets/{name}/enable", response_model=TargetOut, **changes("target.enable", Role.OPERATOR))
async def enable_target(name: Id, let: Let) -> Response:
    """Deliver to it again. Jobs that failed with TARGET_DISABLED can be replayed."""
    let.subject, let.before = name, shown(await _find(let, name))
    return answer(shown(await let.app.targets.enable(name, tenant_id=let.tenant_id, connection=let.connection)))


@routes.post("/targets/{name}/rotate-secret", response_model=TargetMade, **changes("target.rotate", Role.EDITOR))
async def rotate_secret(name: Id, let: Let, body: RotateIn | None = None) -> Response:
    """A new signing secret. For a day, unless told otherwise, requests carry a signature by the old one too."""
    body = body or RotateIn()
    let.subject, let.before = name, shown(await _find(let, name))
    rotated = await let.app.targets.rotate_secret(
        name, signing_secret=_plain(body.signing_secret), overlap=body.overlap_seconds, tenant_id=let.tenant_id,
        connection=let.connection,
    )  # fmt: skip
    return _once(let, rotated)


@routes.post("/targets/{name}/test", response_model=TestOut, **changes(TEST, Role.OPERATOR, streams=True))
async def test_target(name: Id, let: Let) -> Response:
    """Send a signed test event and answer with what came of it. Sent anew each time, also under an Idempotency-Key."""
    await _find(let, name)
    let.subject = name
    async with let.app.store.begin() as let.connection:  # not held while a receiver takes its time
        await record(let, TEST)
    let.connection = None
    return answer(tested(await let.app.targets.test(name, tenant_id=let.tenant_id)))


async def _put(let: Let, name: str, body: TargetPut, *, replace: bool) -> NamedTarget:
    let.subject = name
    had = await let.run(rows.used_secrets, let.tenant_id, name)
    if had or secret_names(body.options) or "connection" in body.options:
        require(let.caller.role, Role.ADMIN)  # whoever says where a secret goes can read it there
    return await let.app.targets.put(
        name, body.kind, body.options, signing_secret=_plain(body.signing_secret), replace=replace,
        tenant_id=let.tenant_id, created_by=let.caller.actor, connection=let.connection,
    )  # fmt: skip


async def _find(let: Let, name: str) -> NamedTarget:
    found: NamedTarget | None = await let.run(rows.find, let.tenant_id, name, let.now)
    if found is None:
        raise missing("target", name)
    return found


def _plain(given: SecretStr | None) -> str | None:
    return None if given is None else given.get_secret_value()


def _once(let: Let, made: NamedTarget, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A target with its new signing secret; the answer that is kept for repeated requests has none."""
    let.kept = {**shown(made), "signingSecret": None}
    return answer({**shown(made), "signingSecret": made.signing_secret}, status, headers)


def shown(target: NamedTarget) -> dict[str, Any]:
    """A target as it is answered."""
    return {
        "name": target.name, "tenantId": target.tenant_id, "kind": target.kind, "options": target.options,
        "signing": [{"until": utc(until)} for until in target.signing], "revision": target.revision,
        "disabledAt": utc(target.disabled_at), "disabledReason": target.disabled_reason,
        "createdAt": utc(target.created_at), "createdBy": target.created_by, "updatedAt": utc(target.updated_at),
    }  # fmt: skip


def tested(test: Tested) -> dict[str, Any]:
    """A test as it is answered."""
    return {
        "delivered": test.delivered, "latencyMs": round(test.latency * 1000), "errorCode": test.code,
        "errorMessage": test.error, "response": test.response, "request": test.sent or None,
    }  # fmt: skip
