"""`timebell db`: show and upgrade the schema version."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from timebell import Timebell, settings
from timebell.cli.output import DIFFERENT, OK, print_message, print_record
from timebell.cli.progress import explain_interrupt
from timebell.feature import Feature
from timebell.store.open import is_compatible, parse_url, read_schema
from timebell.store.version import HEAD


def redact_url(url: str) -> str:
    """Return a database URL with its password masked."""
    return parse_url(url).render_as_string(hide_password=True)


def is_missing(url: str) -> bool:
    """Return whether the URL is a SQLite file that does not exist; opening it would create it."""
    parsed = parse_url(url)
    return parsed.get_backend_name() == "sqlite" and not Path(parsed.database or ":memory:").exists()


async def find_schema(url: str, features: Iterable[Feature] = ()) -> tuple[str | None, list[str]]:
    """Return the schema version of a database, None without tables, and the missing tables of `features`.

    Raises StoreUnreachable, InvalidInput.
    """
    return (None, []) if is_missing(url) else await read_schema(url, features)


def upgrade_tables(database: str | None, *, check: bool) -> int:
    """Upgrade the schema, or with `check` only report whether an upgrade is needed; return the exit code."""
    app = Timebell(database)
    version, missing = asyncio.run(find_schema(app.settings.database_url, app.features))
    shown = redact_url(app.settings.database_url)
    if check:
        return _report_schema(app, version, missing)
    with explain_interrupt(lambda: "Run the command again: it continues where it stopped."):
        after = asyncio.run(app.upgrade())
    if missing:
        print_message(f"{shown} got {', '.join(missing)} ({after}).")
    elif version == after:
        print_message(f"{shown} is already current ({after}).")
    else:
        print_message(f"{shown} upgraded from {version or 'no tables'} to {after}.")
    return OK


def _report_schema(app: Timebell, version: str | None, missing: list[str]) -> int:
    url = app.settings.database_url
    if missing:
        print_message(f"{redact_url(url)} lacks {', '.join(missing)}. Run: timebell db upgrade")
        return DIFFERENT
    if version == HEAD:
        print_message(f"{redact_url(url)} is current ({HEAD}).")
        return OK
    if asyncio.run(is_compatible(url, version)):
        print_message(f"{redact_url(url)} has schema {version} of a newer release; this one ({HEAD}) is compatible.")
        return OK
    print_message(
        f"{redact_url(url)} has {f'schema {version}' if version else 'no tables'}; this release needs {HEAD}."
        " Run: timebell db upgrade"
    )
    return DIFFERENT


def show_status(database: str | None, output_format: str | None) -> int:
    """Print the schema version of the database and the one this release needs; return the exit code."""
    app = Timebell(database)
    version, missing = asyncio.run(find_schema(app.settings.database_url, app.features))
    is_current = not missing and asyncio.run(is_compatible(app.settings.database_url, version))
    shown = redact_url(app.settings.database_url)
    facts = {"database": shown, "schema": version, "needed": HEAD, "current": is_current}
    print_record(facts, settings.load(output=output_format).output)
    return OK
