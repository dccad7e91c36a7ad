"""Back up and restore SQLite files, also while an engine writes to them (SQLite's online backup API)."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

from timebell.errors import Conflict, InvalidInput, StoreUnreachable
from timebell.store.version import VERSION_TABLE

PAGES_PER_STEP = 2_000  # pages per step; writers may proceed between two steps
ProgressCallback = Callable[[int, int], None]


def copy_database(source: Path, target: Path, on_progress: ProgressCallback | None = None) -> int:
    """Copy a database consistently to `target`; return the size of the copy in bytes.

    `target` must not exist. It appears complete or not at all, because the copy is written under another name and then
    renamed. `on_progress` is called with (pages copied, pages in total). Raises Conflict (BACKUP_EXISTS), InvalidInput
    (INVALID_BACKUP), StoreUnreachable.
    """
    if target.exists():
        raise Conflict(f"{target} exists already.", code="BACKUP_EXISTS", fix="Specify a file that does not exist.")
    if not target.parent.is_dir():
        raise InvalidInput(f"There is no folder {target.parent}.", code="INVALID_BACKUP", fix="Create it.")
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        unfinished.unlink(missing_ok=True)
        os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # it contains payloads
        with (
            contextlib.closing(_open_existing(source)) as source_connection,
            contextlib.closing(sqlite3.connect(unfinished)) as copy,
        ):
            source_connection.backup(
                copy,
                pages=PAGES_PER_STEP,
                sleep=0.0,
                progress=lambda _, remaining, total: _report_progress(on_progress, remaining, total),
            )
            copy.execute("PRAGMA journal_mode = DELETE")  # a single file, without -wal and -shm
            check_version(copy, target)
        _fsync(unfinished)
        unfinished.rename(target)
        _fsync(target.parent)
    except (OSError, sqlite3.Error) as error:
        raise StoreUnreachable(f"Cannot copy {source} to {target}: {error}.", fix="Check both disks.") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return target.stat().st_size


def read_version(path: Path) -> str:
    """Return the schema version of an intact backup. Raises InvalidInput (INVALID_BACKUP)."""
    try:
        with contextlib.closing(_open_existing(path)) as connection:
            return check_version(connection, path)
    except sqlite3.Error as error:
        raise _invalid_backup(path, str(error)) from error


def check_version(connection: sqlite3.Connection, path: Path) -> str:
    """Check an open database; return its schema version. Raises InvalidInput (INVALID_BACKUP).

    `path` is the file to report in errors.
    """
    integrity = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if integrity != "ok":
        raise _invalid_backup(path, integrity)
    if connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (VERSION_TABLE,)).fetchone() is None:
        raise _invalid_backup(path, "it has no Timebell tables")
    return str(connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone()[0])  # noqa: S608


def replace_database(replacement: Path, database: Path, previous: Path) -> bool:
    """Replace `database` by `replacement`; return whether it existed. It is preserved as `previous`.

    No engine may run on either file. A file exists at `database` at every moment, because a node that starts without
    one would create an empty database. Raises StoreUnreachable.
    """
    existed = database.exists()
    if existed:
        # A corrupt database is a common reason for a restore: preserve it unchanged if the checkpoint fails.
        with contextlib.suppress(sqlite3.DatabaseError), contextlib.closing(sqlite3.connect(database)) as old:
            old.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        _preserve(database, previous)
    for suffix in ("-wal", "-shm"):
        sidecar = database.with_name(database.name + suffix)
        if existed and suffix == "-wal" and sidecar.exists():  # changes that were not checkpointed
            sidecar.rename(previous.with_name(previous.name + suffix))
        sidecar.unlink(missing_ok=True)
    replacement.replace(database)
    _fsync(database.parent)
    return existed


def _preserve(database: Path, previous: Path) -> None:
    """Make the content of `database` available as `previous`, too, without removing it. Raises StoreUnreachable.

    Creates a hard link, or a copy on file systems without hard links (FAT, some network shares).
    """
    try:
        os.link(database, previous)
    except FileExistsError:
        raise
    except OSError:
        unfinished = previous.with_name(f".{previous.name}.unfinished")
        try:
            os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            shutil.copyfile(database, unfinished)
            _fsync(unfinished)
            unfinished.rename(previous)
        except OSError as error:
            raise StoreUnreachable(
                f"Cannot preserve {database} as {previous}: {error}.", fix="Check the disk."
            ) from error
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)


def _open_existing(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=10)


def _invalid_backup(path: Path, reason: str) -> InvalidInput:
    return InvalidInput(f"{path} is not a Timebell backup: {reason}.", code="INVALID_BACKUP")


def _report_progress(on_progress: ProgressCallback | None, remaining: int, total: int) -> None:
    if on_progress is not None:
        on_progress(total - remaining, total)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
