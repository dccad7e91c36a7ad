"""`timebell backup` and `timebell restore`."""

from __future__ import annotations

import asyncio
import dataclasses
import shlex
from datetime import datetime, timedelta
from pathlib import Path

from timebell import settings as configuration
from timebell.app import Timebell
from timebell.cli.database import is_missing, redact_url
from timebell.cli.inputs import confirm
from timebell.cli.output import FAILED, OK, Format, print_message, print_record
from timebell.cli.progress import explain_interrupt, status_line
from timebell.clock import system_now
from timebell.errors import Conflict, InvalidInput, NotFound, Refused
from timebell.model.planned_job import build_job
from timebell.store import backup as copies
from timebell.store.cluster import nodes
from timebell.store.dialects.base import Store
from timebell.store.open import BACKEND_BY_SCHEME, open_store
from timebell.store.schedules import after_restore
from timebell.store.schedules.after_restore import HeldAfterRestore
from timebell.store.urls import parse_database_url, split_hosts
from timebell.store.version import HEAD

NODE_ALIVE_WINDOW = timedelta(seconds=15)  # a node with a heartbeat within this time is live


def backup(file: Path, database: str | None, output_format: str | None) -> int:
    """Copy a SQLite database while it is in use; return the exit code. Raises TimebellError."""
    chosen = configuration.load(database_url=database, output=output_format)
    source = _sqlite_path(chosen.database_url)
    if source is None:
        name, dump, _ = _native_commands(chosen.database_url, file)
        raise Refused(
            f"{name} has its own backup tools, which work while nodes run.",
            code="USE_DATABASE_BACKUP_TOOLS",
            fix=f"Run: {dump}",
        )
    if is_missing(chosen.database_url):
        raise NotFound(
            f"There is no database {source}.", code="DATABASE_NOT_FOUND", fix="Set --database or TIMEBELL_DATABASE_URL."
        )
    with status_line(lambda: f"The incomplete copy was deleted; {source} is unchanged. Run the command again.") as show:
        size = copies.copy_database(
            source, file, lambda copied, total: show(f"Copying  {100 * copied / max(total, 1):.0f} %")
        )
    facts = {"backup": str(file), "bytes": size, "schema": copies.read_version(file), "at": _format_utc(system_now())}
    if chosen.output != Format.TABLE:
        print_record(facts, chosen.output)
    else:
        print_message(f"Copied {source} to {file}: {size:,} bytes, schema {facts['schema']}, as of {facts['at']}.")
    return OK


def restore(file: Path | None, database: str | None, output_format: str | None, *, yes: bool) -> int:
    """Restore a backup and hold all work that became due since it was taken; return the exit code.

    Without `file` the database was restored by other tools and only the hold is applied. Raises TimebellError.
    """
    chosen = configuration.load(database_url=database, output=output_format)
    target = _sqlite_path(chosen.database_url)
    if target is None and file is not None:
        name, _, restore_command = _native_commands(chosen.database_url, file)
        raise Refused(
            f"{name} is restored with its own tools, while no node runs.", code="USE_DATABASE_BACKUP_TOOLS",
            fix=f"Run: {restore_command} and then: timebell restore",
        )  # fmt: skip
    if file is not None and target is not None:
        _check_backup_file(file)
        if target.exists() and not confirm(f"Replace {target} with {file}?", yes=yes):
            return FAILED
        with explain_interrupt(lambda: f"{target} is as before, or completely restored. Run the command again."):
            held, previous = asyncio.run(_replace_database(file, target))
    elif is_missing(chosen.database_url):
        raise NotFound(f"There is no database {target}.", code="DATABASE_NOT_FOUND", fix="Specify a backup file.")
    else:
        with explain_interrupt(lambda: "Not all due work is on hold: do not start a node. Run the command again."):
            held, previous = asyncio.run(_hold_due_work(chosen.database_url)), None
    before = previous and str(previous)
    facts = {"database": redact_url(chosen.database_url), **dataclasses.asdict(held), "before": before}
    if chosen.output != Format.TABLE:
        print_record(facts, chosen.output)
        return OK
    print_message(f"Restored {facts['database']}." + (f" The previous database is in {previous}." if previous else ""))
    print_message(
        f"On hold until they are released: {held.due:,} due jobs, {held.running:,} jobs that were running at the time"
        f" of the backup, and {held.occurrences:,} occurrences of {held.schedules:,} schedules."
    )
    print_message("Next, start a node. List the held jobs: timebell release. Run them: timebell release --all.")
    return OK


def _check_backup_file(file: Path) -> None:
    if not file.is_file():
        raise NotFound(f"There is no file {file}.", code="BACKUP_NOT_FOUND")
    if (version := copies.read_version(file)) > HEAD:
        raise InvalidInput(
            f"{file} was created by a newer release: its schema is {version}, this release supports {HEAD}.",
            code="BACKUP_NEWER", fix="Restore it with the release that created it, or a newer one.",
        )  # fmt: skip


async def _replace_database(file: Path, target: Path) -> tuple[HeldAfterRestore, Path | None]:
    """Prepare a copy beside the database, then rename it into place.

    Due work is held in the copy, so no node ever sees it runnable. The engine lock keeps nodes from starting meanwhile.
    Returns the counts of held work and the path of the previous database.
    """
    store = open_store(f"sqlite:///{target}", system_now)
    await store.lock_engine()  # raises StoreInUse
    try:
        stamp = f"{system_now():%Y%m%dT%H%M%S}"
        prepared, previous = (target.with_name(f"{target.name}.{label}-{stamp}") for label in ("restored", "before"))
        copies.copy_database(file, prepared)
        try:
            held = await _hold_due_work(f"sqlite:///{prepared}")
            return held, previous if copies.replace_database(prepared, target, previous) else None
        finally:
            for suffix in ("", "-wal", "-shm", "-engine"):
                prepared.with_name(prepared.name + suffix).unlink(missing_ok=True)
    finally:
        await store.unlock_engine()


async def _hold_due_work(url: str) -> HeldAfterRestore:
    """Upgrade the schema and hold all due work. Raises StoreInUse, Conflict (NODES_STILL_RUNNING)."""
    app = Timebell(url, timezone="UTC")
    try:
        await app.upgrade()  # raises SchemaOutdated if the schema is newer
        await app.open()
        if app.store.multi_node:
            await _check_no_live_nodes(app.store)
        else:
            await app.store.lock_engine()
        now = app.clock.now()
        held = await app.store.run(after_restore.hold_jobs, now)
        while (more := await app.store.run(after_restore.hold_occurrences, build_job, now)).schedules:
            held = dataclasses.replace(
                held, occurrences=held.occurrences + more.occurrences, schedules=held.schedules + more.schedules
            )
        return held
    finally:
        await app.close()


async def _check_no_live_nodes(store: Store) -> None:
    now = await store.read_clock()
    live = [node.name for node in await store.run(nodes.list_nodes) if now - node.seen_at < NODE_ALIVE_WINDOW]
    if live:
        raise Conflict(
            f"{', '.join(live[:3])} ran within the last {NODE_ALIVE_WINDOW.seconds} s and may be firing restored work.",
            code="NODES_STILL_RUNNING", fix="Stop every node first.",
        )  # fmt: skip


def _sqlite_path(url: str) -> Path | None:
    """Return the file of a SQLite database, None for a server. Raises InvalidInput (INVALID_DATABASE_URL)."""
    open_store(url, system_now)
    parsed = parse_database_url(url)
    return Path(parsed.database or ":memory:") if parsed.get_backend_name() == "sqlite" else None


def _native_commands(url: str, file: Path) -> tuple[str, str, str]:
    """Return a server's name and the shell commands that dump its database to `file` and restore it from there.

    A password is not part of the commands; a placeholder for its environment variable is.
    """
    parsed, quoted_file = parse_database_url(url), shlex.quote(str(file))
    if BACKEND_BY_SCHEME[parsed.get_backend_name()] == "mysql":
        host, port = split_hosts(parsed, 0)[0]
        options = {
            "host": host,
            "port": port,
            "socket": parsed.query.get("unix_socket"),
            "user": parsed.username,
        }
        flags = " ".join(f"--{name}={shlex.quote(str(value))}" for name, value in options.items() if value)
        arguments, password = (
            f"{flags} {shlex.quote(parsed.database or '')}",
            "MYSQL_PWD=... " if parsed.password else "",
        )
        return (
            "MariaDB",
            f"{password}mariadb-dump --single-transaction {arguments} > {quoted_file}",
            f"{password}mariadb {arguments} < {quoted_file}",
        )
    schema = parsed.query.get("schema")
    only_schema = f" --schema={schema}" if schema else ""
    parsed = parsed.difference_update_query(["schema"])
    quoted_url = shlex.quote(parsed._replace(drivername="postgresql", password=None).render_as_string())
    password = "PGPASSWORD=... " if parsed.password else ""
    return (
        "PostgreSQL", f"{password}pg_dump --dbname={quoted_url} --format=custom{only_schema} --file={quoted_file}",
        f"{password}pg_restore --dbname={quoted_url} --clean --if-exists{only_schema} {quoted_file}",
    )  # fmt: skip


def _format_utc(instant: datetime) -> str:
    return instant.isoformat(timespec="seconds").replace("+00:00", "Z")
