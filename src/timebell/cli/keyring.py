"""Implementation of `timebell key` and `timebell tenant`: writes the same rows and audit records as the API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from timebell.api.keys import render_key
from timebell.api.tenants import render_tenant
from timebell.app import Timebell
from timebell.cli.inputs import print_list
from timebell.cli.output import Format, print_data, print_message, print_record
from timebell.client.validation import check_text
from timebell.durations import parse_duration
from timebell.errors import InvalidInput, NotFound
from timebell.ids import new_id
from timebell.model.audit_values import describe_change
from timebell.model.page import MAX_LIMIT, Page
from timebell.recurrence import zone
from timebell.recurrence.instants import format_instant
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


def create_key(
    name: str, role: str, tenant: str, scopes: list[str] | None, networks: list[str] | None, expires_in: str | None,
    database: str | None, output_format: str | None,
) -> None:  # fmt: skip
    """Create a key and print it. Raises InvalidInput, Refused (SECRET_KEY_MISSING)."""
    app = Timebell(database)
    if role not in list(Role):
        raise InvalidInput(f"There is no role {role!r:.40}.", code="INVALID_ROLE", fix=f"Use {', '.join(Role)}.")
    lifetime_seconds = None if expires_in is None else parse_duration(expires_in)
    if expires_in is not None and not lifetime_seconds:
        raise InvalidInput(f"--expires-in is {expires_in!r:.40}.", code="INVALID_DURATION", fix="E.g. 90d, 12h.")
    id_, secret = keys.generate_key()
    digest = keys.digest(app.settings.secret_key, secret)

    async def write() -> Key:
        await app.open()
        now = app.clock.now()
        key = Key(
            id=id_, tenant_id=None if role == Role.PLATFORM else check_text(tenant, "tenant_id"),
            name=check_text(name, "name"), role=Role(role), scopes=keys.check_scopes(scopes),
            networks=keys.check_networks(networks), created_at=now, created_by=ACTOR,
            expires_at=None if lifetime_seconds is None else now + timedelta(seconds=lifetime_seconds),
        )  # fmt: skip
        return await app.store.run(with_audit_record(
            app, "key.create", key.tenant_id, id_, lambda tx: rows.create_key(tx, key, digest), _key_state(id_)
        ))  # fmt: skip

    key = run_and_close(app, write)
    if resolve_format(app, output_format) == Format.TABLE:
        print_message(f"Created {key.role} key {key.id} of {key.tenant_id or 'the platform'}. It is shown only once:")
        print_data(secret)
    else:
        print_record({**_key_facts(key), "key": secret}, resolve_format(app, output_format))


def list_keys(tenant: str | None, database: str | None, output_format: str | None) -> None:
    """Print the keys of one tenant, or of all tenants."""
    app = Timebell(database)

    async def read() -> list[Key]:
        await app.open()
        return [key async for key in iterate_pages(app, rows.list_keys, tenant)]

    all_keys = [_key_facts(key) for key in run_and_close(app, read)]
    head = ("ID", "TENANT", "NAME", "ROLE", "CREATED", "LAST USED", "STATE")
    print_list(all_keys, resolve_format(app, output_format), head, lambda row: (
        row["id"], row["tenantId"] or "(platform)", row["name"], row["role"], row["createdAt"][:10],
        (row["lastUsedAt"] or "never")[:16], row["state"],
    ))  # fmt: skip


def revoke_key(id_: str, database: str | None) -> None:
    """Revoke a key. Raises NotFound (KEY_NOT_FOUND)."""
    app = Timebell(database)

    async def write() -> None:
        await app.open()
        match = await app.store.run(rows.find_key, id_)
        if match is None:
            raise NotFound(f"There is no key {id_:.40}.", code="KEY_NOT_FOUND", fix="Try: timebell key list.")
        now, tenant_id = app.clock.now(), match[0].tenant_id
        await app.store.run(with_audit_record(
            app, "key.revoke", tenant_id, id_, lambda tx: rows.revoke_key(tx, None, id_, now), _key_state(id_)
        ))  # fmt: skip

    run_and_close(app, write)
    print_message(f"Key {id_} revoked. Every node rejects it within 5 s.")


def list_tenants(database: str | None, output_format: str | None) -> None:
    """Print tenants and their limits."""
    app = Timebell(database)

    async def read() -> list[Tenant]:
        await app.open()
        return [tenant async for tenant in iterate_pages(app, tenants.list_tenants)]

    all_tenants = [_tenant_facts(tenant) for tenant in run_and_close(app, read)]
    head = (
        "TENANT", "CREATED", "SCHEDULES", "PENDING JOBS", "BYTES/DAY", "REQUESTS/SECOND", "CONCURRENT JOBS",
        "STARTS/MINUTE", "JOBS/MONTH", "TIMEZONE",
    )  # fmt: skip
    print_list(all_tenants, resolve_format(app, output_format), head, lambda row: (
        row["id"], row["createdAt"][:10],
        *("-" if row[name] is None else f"{row[name]:,}" if isinstance(row[name], int) else row[name]
          for name in list(row)[2:]),
    ))  # fmt: skip


def set_tenant(
    name: str, limits: Mapping[str, int | None], database: str | None, output_format: str | None, *,
    create_missing: bool, timezone: str | None = None,
) -> None:  # fmt: skip
    """Create a tenant, or change its limits or time zone, and print it.

    Raises InvalidInput, NotFound (TENANT_NOT_FOUND).
    """
    app = Timebell(database)
    check_text(name, "tenant_id")
    if timezone is not None:
        zone(timezone)

    async def write() -> Tenant:
        await app.open()
        tenant, now = await app.store.run(tenants.find_tenant, name), app.clock.now()
        if tenant is None and not create_missing:
            raise NotFound(
                f"There is no tenant {name:.60}.", code="TENANT_NOT_FOUND", fix="Create it: timebell tenant create."
            )
        if tenant is not None and not limits and timezone is None:
            return tenant
        action = "tenant.create" if create_missing else "tenant.update"
        return await app.store.run(with_audit_record(
            app, action, None, name, lambda tx: tenants.upsert_tenant(tx, name, limits, now, timezone),
            _tenant_state(name),
        ))  # fmt: skip

    print_record(_tenant_facts(run_and_close(app, write)), resolve_format(app, output_format))


def with_audit_record(
    app: Timebell, action: str, tenant_id: str | None, subject: str, change: Callable[[Transaction], R],
    read_state: Callable[[Transaction], Mapping[str, Any] | None],
) -> Callable[[Transaction], R]:  # fmt: skip
    """Return a transaction function that makes a change and writes its audit record.

    `read_state` returns the subject as the API renders it, None if it does not exist.
    """

    def change_and_audit(tx: Transaction) -> R:
        previous = read_state(tx)
        result, now = change(tx), app.clock.now()
        before, after = describe_change(previous, read_state(tx))
        audit_log.write_record(tx, AuditRecord(
            id=new_id(now), tenant_id=tenant_id or "default", at=now, actor=ACTOR, actor_kind="cli", action=action,
            subject=subject, before=before, after=after,
        ))  # fmt: skip
        return result

    return change_and_audit


def _key_state(id_: str) -> Callable[[Transaction], Mapping[str, Any] | None]:
    def read(tx: Transaction) -> Mapping[str, Any] | None:
        match = rows.find_key(tx, id_)
        return None if match is None else render_key(match[0])

    return read


def _tenant_state(id_: str) -> Callable[[Transaction], Mapping[str, Any] | None]:
    def read(tx: Transaction) -> Mapping[str, Any] | None:
        tenant = tenants.find_tenant(tx, id_)
        return None if tenant is None else render_tenant(tenant)

    return read


async def iterate_pages(app: Timebell, operation: Callable[..., Page[Any]], *args: Any) -> AsyncIterator[Any]:
    """Yield the rows of every page of a paginated query."""
    after: str | None = None
    while True:
        page = await app.store.run(operation, *args, MAX_LIMIT, after)
        for row in page:
            yield row
        if (after := page.next_cursor) is None:
            return


def run_and_close(app: Timebell, work: Callable[[], Any]) -> Any:
    """Run a coroutine function in a new event loop, then close the app."""

    async def work_and_close() -> Any:
        try:
            return await work()
        finally:
            await app.close()

    return asyncio.run(work_and_close())


def resolve_format(app: Timebell, output_format: str | None) -> str:
    """Return the output format of a flag, or that of the settings."""
    return output_format or app.settings.output


def _key_facts(key: Key) -> dict[str, Any]:
    ends_at = key.revoked_at or key.expires_at
    state = "revoked" if key.revoked_at else "usable" if ends_at is None else f"until {format_instant(ends_at)}"
    return {
        "id": key.id, "tenantId": key.tenant_id, "name": key.name, "role": key.role.value,
        "scopes": _as_list(key.scopes), "networks": _as_list(key.networks), "createdAt": format_instant(key.created_at),
        "expiresAt": key.expires_at and format_instant(key.expires_at),
        "lastUsedAt": key.last_used_at and format_instant(key.last_used_at), "state": state,
    }  # fmt: skip


def _as_list(values: Iterable[str] | None) -> list[str] | None:
    return None if values is None else list(values)


def _tenant_facts(tenant: Tenant) -> dict[str, Any]:
    limits = tenant.limits
    return {
        "id": tenant.id, "createdAt": format_instant(tenant.created_at), "schedules": limits.schedules,
        "pendingJobs": limits.pending_jobs, "payloadBytesPerDay": limits.payload_bytes_per_day,
        "requestsPerSecond": limits.requests_per_second, "jobsAtOnce": limits.jobs_at_once,
        "startsPerMinute": limits.starts_per_minute, "jobsPerMonth": limits.jobs_per_month,
        "timezone": tenant.timezone,
    }  # fmt: skip
