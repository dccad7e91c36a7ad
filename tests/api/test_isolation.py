"""The access rules of every operation: keys, roles, scopes, tenants, fields and audit records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import select

from timebell.api import v1
from timebell.ids import new_id
from timebell.store.schema import audit_log, metadata
from timebell.store.transaction import Transaction
from timebell.tenancy.keys import SCOPES
from timebell.tenancy.roles import Role

from .calls import CALLS, OURS, THEIRS, Operation, World, operations
from .web import NIGHTLY, is_problem

Make = Callable[..., Any]
NAMED_KINDS = (
    "calendar", "secret", "target", "source", "trigger", "audience", "segment", "empty", "phone", "connection", "user",
)  # fmt: skip
READ_ONLY = ("tenantId", "id", "revision", "createdBy", "createdAt", "generation", "fence", "status", "constructor")


def _records(tx: Transaction) -> list[tuple[str, str, str]]:
    columns = (audit_log.c.id, audit_log.c.action, audit_log.c.subject)
    rows = tx.execute(select(*columns).where(audit_log.c.outcome == "done").order_by(audit_log.c.id))
    return [tuple(row) for row in rows]


def _problem_text(response: Any, world: World, names: dict[str, str]) -> str:
    """Return a problem as text, without the request id and with object ids replaced by placeholders."""
    body = {name: value for name, value in response.json().items() if name != "requestId"}
    text = f"{response.status_code} {body}"
    for name, value in names.items():
        text = text.replace(value, f"<{name}>")
    return text


def _is_documented(operation: Operation, response: Any) -> bool:
    """Return whether the OpenAPI document lists the error code of a refused request."""
    document = v1.build_openapi()
    described = document["paths"][operation.path][operation.method.lower()]["responses"][str(response.status_code)]
    shared = document["components"]["responses"][described["$ref"].rpartition("/")[2]]
    return response.json()["code"] in shared["x-codes"]


def test_every_operation_has_a_call_entry() -> None:
    there = {operation.id for operation in operations()}
    assert there == set(CALLS), f"add an entry to tests/api/calls.py for {there ^ set(CALLS)}"


async def test_every_operation_checks_keys_roles_and_scopes(make: Make) -> None:
    async with make(open_here=False) as web:
        world = await World.make(web)
        narrow: dict[tuple[Role, str], str] = {}
        for operation in operations():
            before = await web.app.store.run(_records)
            for key in (None, world.revoked, world.expired):
                refused = await world.call(operation, key)
                is_problem(refused, 401, "UNAUTHORIZED")
                assert _is_documented(operation, refused), operation.id
            for role, key in world.role.items():
                if not role.covers(operation.role):
                    refused = await world.call(operation, key)
                    is_problem(refused, 403, "ROLE_TOO_LOW")
                    assert _is_documented(operation, refused), operation.id
            scope = next(one for one in SCOPES if one != operation.scope)
            tenant = None if operation.role is Role.PLATFORM else OURS
            if (operation.role, scope) not in narrow:
                narrow[operation.role, scope] = await web.key(operation.role, tenant, scopes=(scope,))
            is_problem(await world.call(operation, narrow[operation.role, scope]), 403, "SCOPE_MISSING")
            assert await web.app.store.run(_records) == before, f"{operation.id} was refused, and is recorded as done"
            done = await world.call(operation, world.role[operation.role], timebell_tenant=OURS)
            assert done.status_code == CALLS[operation.id].status, (operation.id, done.text)
            if operation.action is not None:  # read-only operations change nothing
                await world.renew()


async def test_another_tenant_gets_nothing_of_ours(make: Make) -> None:
    async with make(open_here=False) as web:
        world = await World.make(web)
        for operation in operations():
            if operation.role is Role.PLATFORM:
                continue
            call, key = CALLS[operation.id], world.other[operation.role]
            with_header = await world.call(operation, key, timebell_tenant=OURS)
            is_problem(with_header, 403, "TENANT_FORBIDDEN")
            answer = await world.call(operation, key)
            if call.object:
                now, real = web.app.clock.now(), dict(world.names)
                ids = (
                    "schedule",
                    "skipping",
                    "job",
                    "dead",
                    "held",
                    "operation",
                    "device",
                    "campaign",
                    "going",
                    "stopped",
                )
                gone = {**real, **{name: new_id(now) for name in ids}, "key": "0" * 12}
                named_kinds = (*NAMED_KINDS, "session")
                # Objects with equal names get equal replacements, because the texts are compared by name.
                gone |= {name: f"gone-{real[name]}" for name in named_kinds} | {"sourceId": new_id(now)}
                world.names = gone
                call_path = operation.path
                missing = await (
                    web.ask(operation.method, CALLS[operation.id].path.replace(OURS, "missing-tenant"), key=key)
                    if "{id}" in call_path and OURS in call.path
                    else world.call(operation, key)
                )
                world.names = real
                theirs = _problem_text(answer, world, {**real, "tenant": OURS})
                assert theirs == _problem_text(missing, world, {**gone, "tenant": "missing-tenant"}), operation.id
                assert answer.status_code == 404, (operation.id, answer.text)
                assert _is_documented(operation, answer), (operation.id, answer.text)
            elif not call.shared:
                assert answer.status_code == call.status, (operation.id, answer.text)
                ours_alone = ("schedule", "skipping", "job", "dead", "held", "operation", "key", "calendar", "device",
                              "campaign", "phone", "user", "session")  # fmt: skip
                for name in ours_alone:
                    assert world.names[name] not in answer.text, (operation.id, answer.text)
                assert f'"{OURS}"' not in answer.text, (operation.id, answer.text)
        # Their changes affected only their own objects.
        ours = (await web.get("/schedules?limit=500", key=world.role[Role.VIEWER])).json()["items"]
        assert {one["tenantId"] for one in ours} == {OURS}
        assert not [one for one in ours if one["name"].startswith("new-")]


def _rows_of(tx: Transaction, tenant_id: str) -> dict[str, list[str]]:
    """Return all rows of a tenant as text, by table, except requests and records of its calls."""
    tables = [table for table in metadata.sorted_tables if "tenant_id" in table.c and table is not audit_log]
    return {
        table.name: sorted(map(str, tx.execute(select(table).where(table.c.tenant_id == tenant_id)).all()))
        for table in tables
    }


async def test_changes_leave_objects_of_the_same_name_in_another_tenant_alone(make: Make) -> None:
    async with make(open_here=False) as web:
        ours = await World.make(web)
        theirs = await ours.mirror()
        assert [ours.names[kind] for kind in NAMED_KINDS] == [theirs.names[kind] for kind in NAMED_KINDS]
        for operation in operations():
            if operation.action is None or operation.role is Role.PLATFORM:
                continue
            before = await web.app.store.run(_rows_of, OURS)
            done = await theirs.call(operation, theirs.role[operation.role])
            assert done.status_code == CALLS[operation.id].status, (operation.id, done.text)
            assert await web.app.store.run(_rows_of, OURS) == before, operation.id
            ours.called, ours.count = theirs.called, theirs.count
            await theirs.renew()
            await ours.renew()


async def test_filters_cursors_previews_and_idempotency_keys_stay_within_a_tenant(make: Make) -> None:
    async with make(open_here=False) as web:
        world = await World.make(web)
        ours, theirs = world.role[Role.ADMIN], world.other[Role.ADMIN]
        name = (await web.get(f"/schedules/{world.names['schedule']}", key=ours)).json()["name"]
        for query in (f"name={name}", "topic=report.build", "enabled=true", "recent=5"):
            assert (await web.get(f"/schedules?{query}", key=theirs)).json()["items"] == []
        cursor = (await web.get("/schedules?limit=1", key=ours)).json()["nextCursor"]
        assert (await web.get(f"/schedules?cursor={cursor}", key=theirs)).json()["items"] == []
        cursor = (await web.get("/audit-log?limit=1", key=ours)).json()["nextCursor"]
        assert (await web.get(f"/audit-log?cursor={cursor}", key=theirs)).json()["items"] == []
        on_ours = {**NIGHTLY, "calendar": world.names["calendar"]}
        assert (await web.post("/schedules/preview", on_ours, key=ours)).status_code == 200
        is_problem(await web.post("/schedules/preview", on_ours, key=theirs), 404, "CALENDAR_NOT_FOUND")
        is_problem(await web.post("/schedules", on_ours, key=theirs), 404, "CALENDAR_NOT_FOUND")
        first = await web.post("/schedules", {**NIGHTLY, "name": "same"}, key=ours, idempotency_key="same")
        other = await web.post("/schedules", {**NIGHTLY, "name": "same"}, key=theirs, idempotency_key="same")
        assert "idempotency-replayed" not in other.headers
        assert (first.json()["tenantId"], other.json()["tenantId"]) == (OURS, THEIRS)
        forecast = (await web.get("/forecast", key=theirs)).json()
        assert forecast["total"] == 1


async def test_unknown_and_read_only_fields_are_refused_everywhere(make: Make) -> None:
    async with make(open_here=False) as web:
        world = await World.make(web)
        tried = 0
        for operation in operations():
            if operation.takes is None:
                continue
            for name in READ_ONLY:
                if name in (CALLS[operation.id].body or {}):
                    continue
                refused = await world.call(
                    operation, world.role[operation.role], more={name: "x"}, timebell_tenant=OURS
                )
                is_problem(refused, 422, "UNKNOWN_FIELD")
                tried += 1
        assert tried > 100


async def test_every_change_writes_exactly_one_audit_record(make: Make) -> None:
    async with make(open_here=False) as web:
        world = await World.make(web)
        for operation in operations():
            before = await web.app.store.run(_records)
            await world.call(operation, world.role[operation.role], timebell_tenant=OURS)
            added = (await web.app.store.run(_records))[len(before) :]
            if operation.action is None:
                assert added == [], operation.id
            else:
                assert [action for _, action, _ in added] == [operation.action], operation.id
                assert added[0][2], f"{operation.id} has no audit subject"
            if operation.action is not None:  # read-only operations change nothing
                await world.renew()
