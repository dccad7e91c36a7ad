"""`timebell key ...` and `timebell tenant ...`: on the database itself, so that a first admin key can be created."""

from __future__ import annotations

from typing import Annotated

from timebell.cli import click_signatures
from timebell.cli.output import Format

Output = Annotated[Format | None, click_signatures.Option("--output", "-o", help="Output format.  [default: table]")]
Database = Annotated[
    str | None,
    click_signatures.Option(metavar="URL", help="sqlite:///file, postgresql:// or mariadb://user@host/name."),
]
key = click_signatures.Group("API keys, directly in the database.")
tenant = click_signatures.Group("Tenants, directly in the database.")
Limit = Annotated[int | None, click_signatures.Option(min=0, metavar="N", help="Limit; 0: no limit.")]


@key.command("create")
def key_create(
    name: Annotated[str, click_signatures.Argument(help="Name, e.g. of the client that uses the key.")],
    role: Annotated[
        str, click_signatures.Option(metavar="ROLE", help="viewer, operator, editor, admin, or platform (all tenants).")
    ] = "viewer",
    tenant: Annotated[str, click_signatures.Option(help="Tenant that the key can access.")] = "default",
    scope: Annotated[
        list[str] | None, click_signatures.Option(help="Only this part of the API: schedules, jobs, ...; repeatable.")
    ] = None,
    network: Annotated[
        list[str] | None,
        click_signatures.Option(metavar="CIDR", help="Only from this network: 192.0.2.0/24; repeatable."),
    ] = None,
    expires_in: Annotated[str | None, click_signatures.Option(metavar="D", help="Lifetime, e.g. 90d.")] = None,
    database: Database = None,
    output: Output = None,
) -> None:
    """Create a key and print it once. Needs TIMEBELL_SECRET_KEY, with the same value as on every node."""
    from timebell.cli import keyring

    keyring.create_key(name, role, tenant, scope or None, network or None, expires_in, database, output)


@key.command("list")
def key_list(
    tenant: Annotated[str | None, click_signatures.Option(help="Only keys of this tenant.")] = None,
    database: Database = None,
    output: Output = None,
) -> None:
    """List keys, including revoked and expired ones."""
    from timebell.cli import keyring

    keyring.list_keys(tenant, database, output)


@key.command("revoke")
def key_revoke(
    id_: Annotated[str, click_signatures.Argument(metavar="ID", help="Key id: the third part of the key.")],
    database: Database = None,
) -> None:
    """Revoke a key permanently; every node rejects it within 5 s."""
    from timebell.cli import keyring

    keyring.revoke_key(id_, database)


@tenant.command("create")
def tenant_create(
    name: Annotated[str, click_signatures.Argument()], database: Database = None, output: Output = None
) -> None:  # fmt: skip
    """Create a tenant. No effect if it exists."""
    from timebell.cli import keyring

    keyring.set_tenant(name, {}, database, output, create_missing=True)


@tenant.command("list")
def tenant_list(database: Database = None, output: Output = None) -> None:
    """List tenants and their limits."""
    from timebell.cli import keyring

    keyring.list_tenants(database, output)


@tenant.command("quota")
def tenant_quota(
    name: Annotated[str, click_signatures.Argument()],
    schedules: Limit = None,
    pending_jobs: Limit = None,
    payload_bytes_per_day: Limit = None,
    requests_per_second: Limit = None,
    jobs_at_once: Limit = None,
    starts_per_minute: Limit = None,
    jobs_per_month: Limit = None,
    timezone: Annotated[
        str | None, click_signatures.Option(metavar="ZONE", help="Time zone of the month for --jobs-per-month.")
    ] = None,
    database: Database = None,
    output: Output = None,
) -> None:
    """Show or change the limits of a tenant."""
    from timebell.cli import keyring

    flags = {
        "schedules": schedules, "pending_jobs": pending_jobs, "payload_bytes_per_day": payload_bytes_per_day,
        "requests_per_second": requests_per_second, "jobs_at_once": jobs_at_once,
        "starts_per_minute": starts_per_minute, "jobs_per_month": jobs_per_month,
    }  # fmt: skip
    limits = {limit: value or None for limit, value in flags.items() if value is not None}
    keyring.set_tenant(name, limits, database, output, create_missing=False, timezone=timezone)
