"""Copies of a SQLite file, made while an engine writes to it (SQLite's online backup API)."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

from timebell.errors import Conflict, InvalidInput, StoreUnreachable
from timebell.store.open import VERSION_TABLE

PAGES = 2_000  # copied at once, between which writers get their turn
Told = Callable[[int, int], None]


def copy(source: Path, target: Path, told: Told | None = None) -> int:
    """A consistent copy at `target`, which must not exist and appears whole or not at all; its size in bytes.

    `told` hears of (pages copied, pages in all). Raises Conflict (BACKUP_EXISTS), InvalidInput (BACKUP_INVALID),
    StoreUnreachable.
    """
    if target.exists():
        raise Conflict(f"{target} exists already.", code="BACKUP_EXISTS", fix="Name a file that does not exist.")
    if not target.parent.is_dir():
        raise InvalidInput(f"There is no folder {target.parent}.", code="BACKUP_INVALID", fix="Make it.")
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        unfinished.unlink(missing_ok=True)
        os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # it holds payloads
        with contextlib.closing(_reading(source)) as there, contextlib.closing(sqlite3.connect(unfinished)) as here:
            there.backup(here, pages=PAGES, sleep=0.0, progress=lambda _, left, total: _tell(told, left, total))
            here.execute("PRAGMA journal_mode = DELETE")  # one file, nothing beside it
            version_in(here, target)
        _sync(unfinished)
        unfinished.rename(target)
        _sync(target.parent)
    except (OSError, sqlite3.Error) as failed:
        raise StoreUnreachable(f"Cannot copy {source} to {target}: {failed}.", fix="Check both disks.") from failed
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return target.stat().st_size


def version_of(path: Path) -> str:
    """The version of the tables in a backup that is sound. Raises InvalidInput (BACKUP_INVALID)."""
    try:
        with contextlib.closing(_reading(path)) as connection:
            return version_in(connection, path)
    except sqlite3.Error as failed:
        raise _invalid(path, str(failed)) from failed


def version_in(connection: sqlite3.Connection, path: Path) -> str:
    """As `version_of`, of a file that is open."""
    said = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if said != "ok":
        raise _invalid(path, said)
    if connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (VERSION_TABLE,)).fetchone() is None:
        raise _invalid(path, "it has no tables of Timebell")
    return str(connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone()[0])  # noqa: S608


def take_the_place_of(made: Path, database: Path, aside: Path) -> bool:
    """Put `made` where `database` is, which is kept at `aside`; whether there was one. No engine may run on either.

    There is a database under its name at every moment: a node that starts would make an empty one. Raises
    StoreUnreachable.
    """
    there = database.exists()
    if there:
        # One that is broken is why somebody restores: it is kept as it is.
        with contextlib.suppress(sqlite3.DatabaseError), contextlib.closing(sqlite3.connect(database)) as old:
            old.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        _keep(database, aside)
    for beside in ("-wal", "-shm"):
        kept = database.with_name(database.name + beside)
        if there and beside == "-wal" and kept.exists():  # what could not be put into it
            kept.rename(aside.with_name(aside.name + beside))
        kept.unlink(missing_ok=True)
    made.replace(database)
    _sync(database.parent)
    return there


def _keep(database: Path, aside: Path) -> None:
    """Have what is in a file under a second name, while it keeps its own: a hard link or, where a file system has none
    (FAT, some shares), a copy. Raises StoreUnreachable."""
    try:
        os.link(database, aside)
    except FileExistsError:
        raise
    except OSError:
        unfinished = aside.with_name(f".{aside.name}.unfinished")
        try:
            os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            shutil.copyfile(database, unfinished)
            _sync(unfinished)
            unfinished.rename(aside)
        except OSError as failed:
            raise StoreUnreachable(f"Cannot keep {database} as {aside}: {failed}.", fix="Check the disk.") from failed
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)


def _reading(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=10)


def _invalid(path: Path, why: str) -> InvalidInput:
    return InvalidInput(f"{path} is no backup of Timebell: {why}.", code="BACKUP_INVALID")


def _tell(told: Told | None, left: int, total: int) -> None:
    if told is not None:
        told(total - left, total)


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
