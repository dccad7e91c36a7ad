"""`timebell db`: show and upgrade the schema version."""

from __future__ import annotations

import asyncio
from pathlib import Path

from timebell import settings
from timebell.cli.output import DIFFERENT, OK, print_message, print_record
from timebell.cli.progress import explain_interrupt
from timebell.clock import system_now
from timebell.store.open import is_compatible, open_store, parse_url, schema_version, upgrade
from timebell.store.version import HEAD


def redact_url(url: str) -> str:
    """Return a database URL with its password masked."""
    return parse_url(url).render_as_string(hide_password=True)


def is_missing(url: str) -> bool:
    """Return whether the URL is a SQLite file that does not exist; opening it would create it."""
    parsed = parse_url(url)
    return parsed.get_backend_name() == "sqlite" and not Path(parsed.database or ":memory:").exists()


async def find_schema_version(url: str) -> str | None:
    """Return the schema version of a database, None without tables. Raises StoreUnreachable, InvalidInput."""
    open_store(url, system_now)  # raises InvalidInput for unsupported databases
    return None if is_missing(url) else await schema_version(url)


def upgrade_tables(database: str | None, *, check: bool) -> int:
    """Upgrade the schema, or with `check` only report whether an upgrade is needed; return the exit code."""
    url = settings.load(database_url=database).database_url
    if check:
        version = asyncio.run(find_schema_version(url))
        if version == HEAD:
            print_message(f"{redact_url(url)} is current ({HEAD}).")
            return OK
        if asyncio.run(is_compatible(url, version)):
            print_message(
                f"{redact_url(url)} has schema {version} of a newer release; this one ({HEAD}) is compatible."
            )
            return OK
        print_message(
            f"{redact_url(url)} has {f'schema {version}' if version else 'no tables'}; this release needs {HEAD}."
            " Run: timebell db upgrade"
        )
        return DIFFERENT
    asyncio.run(find_schema_version(url))
    with explain_interrupt(lambda: "Run the command again: it continues where it stopped."):
        before, after = asyncio.run(upgrade(url))
    done = "is already current" if before == after else f"upgraded from {before or 'no tables'} to"
    print_message(f"{redact_url(url)} {done} ({after})." if before == after else f"{redact_url(url)} {done} {after}.")
    return OK


def show_status(database: str | None, output_format: str | None) -> int:
    """Print the schema version of the database and the one this release needs; return the exit code."""
    chosen = settings.load(database_url=database, output=output_format)
    version = asyncio.run(find_schema_version(chosen.database_url))
    is_current = asyncio.run(is_compatible(chosen.database_url, version))
    facts = {"database": redact_url(chosen.database_url), "schema": version, "needed": HEAD, "current": is_current}
    print_record(facts, chosen.output)
    return OK
