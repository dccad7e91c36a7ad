"""The work of `timebell key` and `timebell tenant`: the same rows and audit records that the API writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from timebell.app import Timebell
from timebell.cli.inputs import listed
from timebell.cli.output import Format, emit_one, say, show
from timebell.client.validation import text
from timebell.errors import InvalidInput, NotFound
from timebell.ids import new_id
from timebell.model.page import MAX_LIMIT, Page
from timebell.recurrence import zone
from timebell.recurrence.instants import format_instant
from timebell.settings import duration
from timebell.store.audit import audit_log
from timebell.store.audit.audit_log import AuditRecord
from timebell.store.tenancy import api_keys as rows
from timebell.store.tenancy import tenants
from timebell.store.tenancy.tenants import Tenant
from timebell.store.transaction import Transaction
from timebell.tenancy import keys
from timebell.tenancy.keys import Key
from timebell.tenancy.roles import Role

R = TypeVar("R")
ACTOR = "command line"


def create(
    name: str, role: str, tenant: str, scopes: list[str] | None, networks: list[str] | None, expires_in: str | None,
    database: str | None, form: str | None,
) -> None:  # fmt: skip
    """Write a key and print it. Raises InvalidInput, Refused (SECRET_KEY_MISSING)."""
    app = Timebell(database)
    if role not in list(Role):
        raise InvalidInput(f"There is no role {role!r:.40}.", code="INVALID_ROLE", fix=f"Use {', '.join(Role)}.")
    lasts = None if expires_in is None else duration(expires_in)
    if expires_in is not None and not lasts:
        raise InvalidInput(f"--expires-in is {expires_in!r:.40}.", code="INVALID_DURATION", fix="E.g. 90d, 12h.")
    id_, made = keys.mint()
    digest = keys.digest(app.settings.secret_key, made)

    async def write() -> Key:
        await app.open()
        now = app.clock.now()
        key = Key(
            id=id_, tenant_id=None if role == Role.PLATFORM else text(tenant, "tenant_id"), name=text(name, "name"),
            role=Role(role), scopes=keys.check_scopes(scopes), networks=keys.check_networks(networks), created_at=now,
            created_by=ACTOR, expires_at=None if lasts is None else now + timedelta(seconds=lasts),
        )  # fmt: skip
        return await app.store.run(
            _recorded(app, "key.create", key.tenant_id, id_, lambda tx: rows.create(tx, key, digest))
        )

    key = _run(app, write)
    if _form(app, form) == Format.TABLE:
        say(f"{key.role} key {key.id} of {key.tenant_id or 'the platform'}. It is not shown again:")
        show(made)
    else:
        emit_one({**_key(key), "key": made}, _form(app, form))


def show_all(tenant: str | None, database: str | None, form: str | None) -> None:
    """List keys."""
    app = Timebell(database)

    async def read() -> list[Key]:
        await app.open()
        return [key async for key in _pages(app, rows.page, tenant)]

    found = [_key(key) for key in _run(app, read)]
    head = ("ID", "TENANT", "NAME", "ROLE", "MADE", "LAST USED", "STATE")
    listed(found, _form(app, form), head, lambda one: (
        one["id"], one["tenantId"] or "(platform)", one["name"], one["role"], one["createdAt"][:10],
        (one["lastUsedAt"] or "never")[:16], one["state"],
    ))  # fmt: skip


def revoke(id_: str, database: str | None) -> None:
    """Revoke a key. Raises NotFound (KEY_NOT_FOUND)."""
    app = Timebell(database)

    async def write() -> None:
        await app.open()
        found = await app.store.run(rows.find, id_)
        if found is None:
            raise NotFound(f"There is no key {id_:.40}.", code="KEY_NOT_FOUND", fix="timebell key list shows them.")
        now, whose = app.clock.now(), found[0].tenant_id
        await app.store.run(_recorded(app, "key.revoke", whose, id_, lambda tx: rows.revoke(tx, None, id_, now)))

    _run(app, write)
    say(f"{id_} is revoked: within 5 s no node takes it.")


def show_tenants(database: str | None, form: str | None) -> None:
    """List tenants."""
    app = Timebell(database)

    async def read() -> list[Tenant]:
        await app.open()
        return [tenant async for tenant in _pages(app, tenants.page)]

    found = [_tenant(tenant) for tenant in _run(app, read)]
    head = (
        "TENANT",
        "MADE",
        "SCHEDULES",
        "PENDING JOBS",
        "BYTES A DAY",
        "REQUESTS A SECOND",
        "JOBS AT ONCE",
        "STARTS A MINUTE",
        "JOBS A MONTH",
        "TIMEZONE",
    )
    listed(found, _form(app, form), head, lambda one: (
        one["id"], one["createdAt"][:10],
        *("-" if one[name] is None else f"{one[name]:,}" if isinstance(one[name], int) else one[name]
          for name in list(one)[2:]),
    ))  # fmt: skip


def put_tenant(
    name: str, limits: Mapping[str, int | None], database: str | None, form: str | None, *, make: bool,
    timezone: str | None = None,
) -> None:  # fmt: skip
    """Make a tenant, or change limits of one. Raises InvalidInput, NotFound (TENANT_NOT_FOUND)."""
    app = Timebell(database)
    text(name, "tenant_id")
    if timezone is not None:
        zone(timezone)

    async def write() -> Tenant:
        await app.open()
        found, now = await app.store.run(tenants.find, name), app.clock.now()
        if found is None and not make:
            raise NotFound(
                f"There is no tenant {name:.60}.", code="TENANT_NOT_FOUND", fix="timebell tenant create makes one."
            )
        if found is not None and not limits and timezone is None:
            return found
        action = "tenant.create" if make else "tenant.update"
        return await app.store.run(_recorded(
            app, action, None, name, lambda tx: tenants.put(tx, name, limits, now, timezone)
        ))  # fmt: skip

    emit_one(_tenant(_run(app, write)), _form(app, form))


def _recorded(
    app: Timebell, action: str, tenant_id: str | None, subject: str, change: Callable[[Transaction], R]
) -> Callable[[Transaction], R]:
    """A change together with its audit record."""

    def both(tx: Transaction) -> R:
        done, now = change(tx), app.clock.now()
        audit_log.write(tx, AuditRecord(
            id=new_id(now), tenant_id=tenant_id or "default", at=now, actor=ACTOR, action=action, subject=subject
        ))  # fmt: skip
        return done

    return both


async def _pages(app: Timebell, operation: Callable[..., Page[Any]], *args: Any) -> AsyncIterator[Any]:
    after: str | None = None
    while True:
        page = await app.store.run(operation, *args, MAX_LIMIT, after)
        for one in page:
            yield one
        if (after := page.next_cursor) is None:
            return


def _run(app: Timebell, work: Callable[[], Any]) -> Any:
    async def closing() -> Any:
        try:
            return await work()
        finally:
            await app.close()

    return asyncio.run(closing())


def _form(app: Timebell, form: str | None) -> str:
    return form or app.settings.output


def _key(key: Key) -> dict[str, Any]:
    now = key.revoked_at or key.expires_at
    state = "revoked" if key.revoked_at else "usable" if now is None else f"until {format_instant(now)}"
    return {
        "id": key.id, "tenantId": key.tenant_id, "name": key.name, "role": key.role.value,
        "scopes": _list(key.scopes), "networks": _list(key.networks), "createdAt": format_instant(key.created_at),
        "expiresAt": key.expires_at and format_instant(key.expires_at),
        "lastUsedAt": key.last_used_at and format_instant(key.last_used_at), "state": state,
    }  # fmt: skip


def _list(given: Iterable[str] | None) -> list[str] | None:
    return None if given is None else list(given)


def _tenant(tenant: Tenant) -> dict[str, Any]:
    limits = tenant.limits
    return {
        "id": tenant.id, "createdAt": format_instant(tenant.created_at), "schedules": limits.schedules,
        "pendingJobs": limits.pending_jobs, "payloadBytesPerDay": limits.payload_bytes_per_day,
        "requestsPerSecond": limits.requests_per_second, "jobsAtOnce": limits.jobs_at_once,
        "startsPerMinute": limits.starts_per_minute, "jobsPerMonth": limits.jobs_per_month,
        "timezone": tenant.timezone,
    }  # fmt: skip
