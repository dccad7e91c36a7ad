"""`timebell key ...` and `timebell tenant ...`: on the database itself, so that a first admin key can be created."""

from __future__ import annotations

import click

from timebell.cli.groups import Group
from timebell.cli.options import database_option, output_option

key = Group("API keys, directly in the database.")
tenant = Group("Tenants, directly in the database.")


@key.command("create")
@click.argument("name", help="Name, e.g. of the client that uses the key.")
@click.option(
    "--role",
    default="viewer",
    show_default=True,
    metavar="ROLE",
    help="viewer, operator, editor, admin, or platform (all tenants).",
)
@click.option("--tenant", default="default", show_default=True, help="Tenant that the key can access.")
@click.option("--scope", multiple=True, help="Only this part of the API: schedules, jobs, ...; repeatable.")
@click.option("--network", multiple=True, metavar="CIDR", help="Only from this network: 192.0.2.0/24; repeatable.")
@click.option("--expires-in", metavar="D", help="Lifetime, e.g. 90d.")
@database_option
@output_option
def key_create(
    name: str,
    role: str,
    tenant: str,
    scope: tuple[str, ...],
    network: tuple[str, ...],
    expires_in: str | None,
    database: str | None,
    output: str | None,
) -> None:
    """Create a key and print it once. Needs TIMEBELL_SECRET_KEY, with the same value as on every node."""
    from timebell.cli import keyring

    keyring.create_key(name, role, tenant, list(scope) or None, list(network) or None, expires_in, database, output)


@key.command("list")
@click.option("--tenant", help="Only keys of this tenant.")
@database_option
@output_option
def key_list(tenant: str | None, database: str | None, output: str | None) -> None:
    """List keys, including revoked and expired ones."""
    from timebell.cli import keyring

    keyring.list_keys(tenant, database, output)


@key.command("revoke")
@click.argument("id_", metavar="ID", help="Key id: the third part of the key.")
@database_option
def key_revoke(id_: str, database: str | None) -> None:
    """Revoke a key permanently; every node rejects it within 5 s."""
    from timebell.cli import keyring

    keyring.revoke_key(id_, database)


@tenant.command("create")
@click.argument("name", help="Tenant name.")
@database_option
@output_option
def tenant_create(name: str, database: str | None, output: str | None) -> None:
    """Create a tenant. No effect if it exists."""
    from timebell.cli import keyring

    keyring.set_tenant(name, {}, database, output, create_missing=True)


@tenant.command("list")
@database_option
@output_option
def tenant_list(database: str | None, output: str | None) -> None:
    """List tenants and their limits."""
    from timebell.cli import keyring

    keyring.list_tenants(database, output)


@tenant.command("quota")
@click.argument("name", help="Tenant name.")
@click.option("--schedules", type=click.IntRange(min=0), metavar="N", help="Limit; 0: no limit.")
@click.option("--pending-jobs", type=click.IntRange(min=0), metavar="N", help="Limit; 0: no limit.")
@click.option("--payload-bytes-per-day", type=click.IntRange(min=0), metavar="N", help="Limit; 0: no limit.")
@click.option("--requests-per-second", type=click.IntRange(min=0), metavar="N", help="Limit; 0: no limit.")
@click.option("--jobs-at-once", type=click.IntRange(min=0), metavar="N", help="Limit; 0: no limit.")
@click.option("--starts-per-minute", type=click.IntRange(min=0), metavar="N", help="Limit; 0: no limit.")
@click.option("--jobs-per-month", type=click.IntRange(min=0), metavar="N", help="Limit; 0: no limit.")
@click.option("--timezone", metavar="ZONE", help="Time zone of the month for --jobs-per-month.")
@database_option
@output_option
def tenant_quota(
    name: str,
    schedules: int | None,
    pending_jobs: int | None,
    payload_bytes_per_day: int | None,
    requests_per_second: int | None,
    jobs_at_once: int | None,
    starts_per_minute: int | None,
    jobs_per_month: int | None,
    timezone: str | None,
    database: str | None,
    output: str | None,
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
