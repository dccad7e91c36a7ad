"""`timebell backup` and `timebell restore`."""

from __future__ import annotations

import asyncio
import dataclasses
import shlex
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import make_url

from timebell import settings as configuration
from timebell.app import Timebell
from timebell.cli.database import missing, shown
from timebell.cli.inputs import confirmed
from timebell.cli.output import FAILED, OK, Format, emit_one, say
from timebell.clock import wall
from timebell.engine.planner import job_of
from timebell.errors import Conflict, InvalidInput, NotFound, Refused
from timebell.store import backup as copies
from timebell.store.cluster import nodes
from timebell.store.dialects.base import Store
from timebell.store.open import HEAD, KINDS, open_store, upgrade
from timebell.store.schedules import after_restore
from timebell.store.schedules.after_restore import HeldBack

QUIET = timedelta(seconds=15)  # a node that was seen within so long runs


def backup(file: Path, database: str | None, form: str | None) -> int:
    """Copy a SQLite database while it is in use; the exit code. Raises TimebellError."""
    chosen = configuration.load(database_url=database, output=form)
    source = _file_of(chosen.database_url)
    if source is None:
        name, dump, _ = _own_tools(chosen.database_url, file)
        raise Refused(
            f"{name} is backed up with its own tools, while nodes run.", code="BACKUP_ELSEWHERE", fix=f"Run: {dump}"
        )
    if missing(chosen.database_url):
        raise NotFound(
            f"There is no database {source}.", code="DATABASE_NOT_FOUND", fix="Give its address: --database."
        )
    size = copies.copy(source, file)
    facts = {"backup": str(file), "bytes": size, "schema": copies.version_of(file), "at": _z(wall())}
    if chosen.output != Format.TABLE:
        emit_one(facts, chosen.output)
    else:
        say(f"{source} is in {file}: {size:,} bytes, tables {facts['schema']}, as of {facts['at']}.")
    return OK


def restore(file: Path | None, database: str | None, form: str | None, *, yes: bool) -> int:
    """Put a backup in place and hold what fell due since it was made; the exit code. Raises TimebellError."""
    chosen = configuration.load(database_url=database, output=form)
    target = _file_of(chosen.database_url)
    if target is None and file is not None:
        name, _, back = _own_tools(chosen.database_url, file)
        raise Refused(
            f"{name} is restored with its own tools, while no node runs.", code="BACKUP_ELSEWHERE",
            fix=f"Run: {back} and then: timebell restore",
        )  # fmt: skip
    if file is not None and target is not None:
        _check(file)
        if target.exists() and not confirmed(f"Put {file} in the place of {target}?", yes=yes):
            return FAILED
        held, aside = asyncio.run(_put(file, target))
    elif missing(chosen.database_url):
        raise NotFound(f"There is no database {target}.", code="DATABASE_NOT_FOUND", fix="Name a backup.")
    else:
        held, aside = asyncio.run(_held_back(chosen.database_url)), None
    facts = {"database": shown(chosen.database_url), **dataclasses.asdict(held), "before": aside and str(aside)}
    if chosen.output != Format.TABLE:
        emit_one(facts, chosen.output)
        return OK
    say(f"{facts['database']} is restored." + (f" What was there is in {aside}." if aside else ""))
    say(
        f"Nothing that fell due since the backup fires unasked: {held.due:,} jobs that were due, {held.running:,} that"
        f" ran then, and {held.occurrences:,} occurrences of {held.schedules:,} schedules wait."
    )
    say("Start a node, then: timebell recover, which shows them; --release or --discard them.")
    return OK


def _check(file: Path) -> None:
    if not file.is_file():
        raise NotFound(f"There is no file {file}.", code="BACKUP_NOT_FOUND")
    if (found := copies.version_of(file)) > HEAD:
        raise InvalidInput(
            f"{file} is of a newer release: it has the tables {found}, and this one knows {HEAD}.",
            code="BACKUP_NEWER", fix="Restore it with the release that made it, or a newer one.",
        )  # fmt: skip


async def _put(file: Path, target: Path) -> tuple[HeldBack, Path | None]:
    """Prepare a copy beside the database and put it in place whole: what is in it is held before any node sees it."""
    store = open_store(f"sqlite:///{target}", wall)
    await store.lock_engine()  # raises StoreInUse
    try:
        stamp = f"{wall():%Y%m%dT%H%M%S}"
        made, aside = (target.with_name(f"{target.name}.{word}-{stamp}") for word in ("restored", "before"))
        copies.copy(file, made)
        try:
            held = await _held_back(f"sqlite:///{made}")
            return held, aside if copies.take_the_place_of(made, target, aside) else None
        finally:
            for beside in ("", "-wal", "-shm", "-engine"):
                made.with_name(made.name + beside).unlink(missing_ok=True)
    finally:
        await store.unlock_engine()


async def _held_back(url: str) -> HeldBack:
    """Bring the tables up to date and hold what is due. Raises StoreInUse, Conflict (NODES_RUN)."""
    await upgrade(url)  # raises SchemaOutdated for a newer one
    app = Timebell(url, timezone="UTC")
    try:
        await app.open()
        if app.store.many_nodes:
            await _check_quiet(app.store)
        else:
            await app.store.lock_engine()
        now = app.clock.now()
        held = await app.store.run(after_restore.hold_jobs, now)
        while (more := await app.store.run(after_restore.hold_occurrences, job_of, now)).schedules:
            held = dataclasses.replace(
                held, occurrences=held.occurrences + more.occurrences, schedules=held.schedules + more.schedules
            )
        return held
    finally:
        await app.close()


async def _check_quiet(store: Store) -> None:
    now = await store.reading()
    live = [node.name for node in await store.run(nodes.listed) if now - node.seen_at < QUIET]
    if live:
        raise Conflict(
            f"{', '.join(live[:3])} ran within the last {QUIET.seconds} s, and may be firing what was restored.",
            code="NODES_RUN", fix="Stop every node first.",
        )  # fmt: skip


def _file_of(url: str) -> Path | None:
    """The file of a SQLite database; None for a server. Raises InvalidInput (DATABASE_URL_INVALID)."""
    open_store(url, wall)
    made = make_url(url)
    return Path(made.database or ":memory:") if made.get_backend_name() == "sqlite" else None


def _own_tools(url: str, file: Path) -> tuple[str, str, str]:
    """What a server is called, and its own commands that back a database up to a file and restore it; a password is
    for its own variable."""
    made, kept = make_url(url), shlex.quote(str(file))
    if KINDS[made.get_backend_name()] == "mysql":
        place = {"host": made.host, "port": made.port, "socket": made.query.get("unix_socket"), "user": made.username}
        at = " ".join(f"--{name}={shlex.quote(str(value))}" for name, value in place.items() if value)
        on, secret = f"{at} {shlex.quote(made.database or '')}", "MYSQL_PWD=... " if made.password else ""
        return "MariaDB", f"{secret}mariadb-dump --single-transaction {on} > {kept}", f"{secret}mariadb {on} < {kept}"
    bare = shlex.quote(made._replace(drivername="postgresql", password=None).render_as_string())
    secret = "PGPASSWORD=... " if made.password else ""
    return (
        "PostgreSQL", f"{secret}pg_dump --dbname={bare} --format=custom --file={kept}",
        f"{secret}pg_restore --dbname={bare} --clean --if-exists {kept}",
    )  # fmt: skip


def _z(instant: datetime) -> str:
    return instant.isoformat(timespec="seconds").replace("+00:00", "Z")
