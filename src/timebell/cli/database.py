"""`timebell db`: the tables, and whether they are those of this version."""

from __future__ import annotations

import asyncio
from pathlib import Path

from timebell import settings
from timebell.cli.output import DIFFERENT, OK, emit_one, say
from timebell.clock import wall
from timebell.store.open import HEAD, address, open_store, upgrade, version, works


def shown(url: str) -> str:
    """A database address without its password."""
    return address(url).render_as_string(hide_password=True)


def missing(url: str) -> bool:
    """Whether it is a SQLite file that does not exist, which looking at it would make."""
    made = address(url)
    return made.get_backend_name() == "sqlite" and not Path(made.database or ":memory:").exists()


async def found_version(url: str) -> str | None:
    """The version of the tables there. Raises StoreUnreachable, InvalidInput."""
    open_store(url, wall)  # refuses addresses of other databases
    return None if missing(url) else await version(url)


def upgrade_tables(database: str | None, *, check: bool) -> int:
    """Bring the tables up to this version, or with `check` only say whether they are; the exit code."""
    url = settings.load(database_url=database).database_url
    if check:
        found = asyncio.run(found_version(url))
        if found == HEAD:
            say(f"{shown(url)} is current ({HEAD}).")
            return OK
        if asyncio.run(works(url, found)):
            say(f"{shown(url)} has {found}, of a newer release; this one ({HEAD}) works on it.")
            return OK
        say(f"{shown(url)} has {found or 'no tables'}; this release needs {HEAD}. Run: timebell db upgrade")
        return DIFFERENT
    asyncio.run(found_version(url))
    before, after = asyncio.run(upgrade(url))
    done = "was current already" if before == after else f"went from {before or 'no tables'} to"
    say(f"{shown(url)} {done} ({after})." if before == after else f"{shown(url)} {done} {after}.")
    return OK


def show_status(database: str | None, form: str | None) -> int:
    """What is there and what this release needs; the exit code."""
    chosen = settings.load(database_url=database, output=form)
    found = asyncio.run(found_version(chosen.database_url))
    fits = asyncio.run(works(chosen.database_url, found))
    facts = {"database": shown(chosen.database_url), "schema": found, "needed": HEAD, "current": fits}
    emit_one(facts, chosen.output)
    return OK
