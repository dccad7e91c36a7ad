"""`timebell key ...` and `timebell tenant ...`: straight on the database, so that there is a first admin."""

from __future__ import annotations

from typing import Annotated

from timebell.cli import click_signatures
from timebell.cli.output import Format

Output = Annotated[Format | None, click_signatures.Option("--output", "-o", help="How to print.  [default: table]")]
Database = Annotated[
    str | None,
    click_signatures.Option(metavar="URL", help="sqlite:///file, postgresql:// or mariadb://user@host/name."),
]
key = click_signatures.Group("API keys, on the database itself.")
tenant = click_signatures.Group("Tenants, on the database itself.")
Most = Annotated[int | None, click_signatures.Option(min=0, metavar="N", help="At most so many; 0: no limit.")]


@key.command("create")
def key_create(
    name: Annotated[str, click_signatures.Argument(help="Who will use it.")],
    role: Annotated[
        str, click_signatures.Option(metavar="ROLE", help="viewer, operator, editor, admin, or platform: all tenants.")
    ] = "viewer",
    tenant: Annotated[str, click_signatures.Option(help="Whose data it opens.")] = "default",
    scope: Annotated[
        list[str] | None, click_signatures.Option(help="Only this part of the API: schedules, jobs, ...")
    ] = None,
    network: Annotated[
        list[str] | None, click_signatures.Option(metavar="CIDR", help="Only from there: 192.0.2.0/24.")
    ] = None,
    expires_in: Annotated[str | None, click_signatures.Option(metavar="D", help="Only for so long: 90d.")] = None,
    database: Database = None,
    output: Output = None,
) -> None:
    """Make a key and print it, this once. Needs TIMEBELL_SECRET_KEY, the same as on every node."""
    from timebell.cli import keyring

    keyring.create(name, role, tenant, scope or None, network or None, expires_in, database, output)


@key.command("list")
def key_list(
    tenant: Annotated[str | None, click_signatures.Option(help="Only of this tenant.")] = None,
    database: Database = None,
    output: Output = None,
) -> None:
    """List keys, revoked and expired ones too."""
    from timebell.cli import keyring

    keyring.show_all(tenant, database, output)


@key.command("revoke")
def key_revoke(
    id_: Annotated[str, click_signatures.Argument(metavar="ID", help="The id, which is the third part of a key.")],
    database: Database = None,
) -> None:
    """Make a key useless for ever, within 5 s on every node."""
    from timebell.cli import keyring

    keyring.revoke(id_, database)


@tenant.command("create")
def tenant_create(
    name: Annotated[str, click_signatures.Argument()], database: Database = None, output: Output = None
) -> None:  # fmt: skip
    """Make a tenant. It is no error if there is one."""
    from timebell.cli import keyring

    keyring.put_tenant(name, {}, database, output, make=True)


@tenant.command("list")
def tenant_list(database: Database = None, output: Output = None) -> None:
    """List tenants and what they may use."""
    from timebell.cli import keyring

    keyring.show_tenants(database, output)


@tenant.command("quota")
def tenant_quota(
    name: Annotated[str, click_signatures.Argument()],
    schedules: Most = None,
    pending_jobs: Most = None,
    payload_bytes_per_day: Most = None,
    requests_per_second: Most = None,
    jobs_at_once: Most = None,
    starts_per_minute: Most = None,
    jobs_per_month: Most = None,
    timezone: Annotated[str | None, click_signatures.Option(metavar="ZONE", help="In which its months begin.")] = None,
    database: Database = None,
    output: Output = None,
) -> None:
    """Show or change what a tenant may use."""
    from timebell.cli import keyring

    given = {
        "schedules": schedules, "pending_jobs": pending_jobs, "payload_bytes_per_day": payload_bytes_per_day,
        "requests_per_second": requests_per_second, "jobs_at_once": jobs_at_once,
        "starts_per_minute": starts_per_minute, "jobs_per_month": jobs_per_month,
    }  # fmt: skip
    limits = {limit: most or None for limit, most in given.items() if most is not None}
    keyring.put_tenant(name, limits, database, output, make=False, timezone=timezone)
