"""`timebell import crontab`: turn each entry into a schedule with a command target and a stable name."""

from __future__ import annotations

import asyncio
import dataclasses
import getpass
import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

from timebell.app import Timebell
from timebell.cli.crontab import Crontab, Entry, has_user_column, parse
from timebell.cli.output import FAILED, OK, print_message, print_records, print_table
from timebell.errors import InvalidInput, Refused, TimebellError
from timebell.formatting import format_relative, to_local
from timebell.model.policy import Retry
from timebell.model.schedule import Schedule
from timebell.recurrence import Cron
from timebell.settings import load

# cron has no time limit; this one keeps hanging commands from accumulating.
COMMAND_TIMEOUT_SECONDS = 24 * 3600.0
DIFFERENCES_FROM_CRON = (
    "Unlike cron, an entry does not start while its previous run is still running, and after an outage the latest"
    " missed run is executed. Like cron, a failed command is not retried."
)


def import_crontab(
    file: Path | None, timezone: str | None, database: str | None, output_format: str | None, *,
    system: bool | None, dry_run: bool,
) -> int:  # fmt: skip
    """Import a crontab; with `dry_run` only print the schedules. Return the exit code. Raises TimebellError.

    `file` None means `crontab -l`; `system` None detects whether there is a user column.
    """
    chosen = load(database_url=database, default_timezone=timezone, output=output_format)
    text, name, system = _read_crontab(file, system)
    crontab = parse(text, system=system)
    if not (chosen.command_enabled or dry_run):
        raise Refused(
            "A crontab runs commands, and command targets are disabled.", code="COMMAND_TARGET_OFF",
            fix="Set TIMEBELL_COMMAND_ENABLED=true here and on every node, or use --dry-run first.",
        )  # fmt: skip
    app = Timebell(database, timezone=timezone)
    app.settings = dataclasses.replace(app.settings, command_enabled=True)
    rows = asyncio.run(_write_schedules(app, crontab, name, dry_run=dry_run))
    if chosen.output == "table":
        _print_rows(rows)
    else:
        print_records(rows, chosen.output)
    _print_notes(crontab, name)
    return FAILED if crontab.refused else OK


def _read_crontab(file: Path | None, system: bool | None) -> tuple[str, str, bool]:
    """Return the text, its origin, and whether it has a user column."""
    if file is None:
        return _read_user_crontab(), "crontab -l", bool(system)
    try:
        raw = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as failed:
        raise InvalidInput(f"{file} cannot be read: {failed}.", code="FILE_UNREADABLE") from failed
    if system is None:
        system = has_user_column(text, str(file.absolute()), _is_user)
        form = "system form, with a user column" if system else "user form, without a user column"
        print_message(f"Detected {form}. If this is wrong, add {'--user' if system else '--system'}.")
    return text, str(file), system


def _read_user_crontab() -> str:
    """Return the crontab of this user. Raises InvalidInput (FILE_UNREADABLE)."""
    try:
        done = subprocess.run(["crontab", "-l"], capture_output=True, text=True, check=False, timeout=30)  # noqa: S607
    except (OSError, subprocess.TimeoutExpired) as failed:
        raise InvalidInput(
            "There is no crontab command here.", code="FILE_UNREADABLE", fix="Specify a file."
        ) from failed
    if done.returncode:
        raise InvalidInput(f"crontab -l: {done.stderr.strip()}.", code="FILE_UNREADABLE", fix="Specify a file.")
    return done.stdout


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _draft_schedules(app: Timebell, crontab: Crontab) -> list[tuple[Entry, Schedule]]:
    """Build and validate the schedules; invalid entries are added to `crontab.refused`."""
    now, me = app.clock.now(), getpass.getuser()
    drafts = []
    for entry in crontab.entries:
        options: dict[str, Any] = {
            "name": f"crontab-{entry.user or me}-{entry.fingerprint}", "timezone": entry.timezone,
            "target": {"kind": "command", **_command_options(entry)}, "retry": Retry(attempts=1),
            "timeout": COMMAND_TIMEOUT_SECONDS,
            "metadata": {"crontab": {"user": entry.user or me, "line": entry.line}},
        }  # fmt: skip
        try:
            drafts.append((entry, app.schedules.draft("crontab.run", Cron(entry.expression), options, now)))
        except TimebellError as bad:
            if bad.code == "TIMEZONE_MISSING":
                raise InvalidInput(
                    "A crontab has no time zone, and the zone of this host is never used.", code="TIMEZONE_MISSING",
                    fix="Add --timezone Asia/Seoul, or CRON_TZ=Asia/Seoul to the file.",
                ) from bad  # fmt: skip
            crontab.refused.append((entry.number, f"{bad} ({bad.code})"))
    return drafts


def _command_options(entry: Entry) -> dict[str, Any]:
    """Return options that run the command as cron does: in a shell, with HOME and LOGNAME, in the home folder."""
    home = os.path.expanduser("~")
    env = {"HOME": home, "LOGNAME": getpass.getuser(), "SHELL": entry.shell, **entry.env}
    options: dict[str, Any] = {"argv": [entry.shell, "-c", entry.command], "env": env, "stdin": entry.stdin}
    return options | ({"cwd": env["HOME"]} if os.path.isdir(env["HOME"]) else {})


async def _write_schedules(app: Timebell, crontab: Crontab, name: str, *, dry_run: bool) -> list[dict[str, Any]]:
    """Write the schedules and return one row per schedule. A dry run does not open the database."""
    if dry_run:
        return [_row(name, entry, draft, "would be created", app) for entry, draft in _draft_schedules(app, crontab)]
    rows = []
    try:
        await app.open()  # from here on, app.clock follows the database clock
        for entry, draft in _draft_schedules(app, crontab):
            stored = await app.schedules.put(draft, replace=True)
            changed = "changed" if stored.updated_at >= draft.updated_at else "unchanged"
            rows.append(_row(name, entry, stored, "created" if stored.id == draft.id else changed, app))
    finally:
        await app.close()
    return rows


def _row(name: str, entry: Entry, schedule: Schedule, outcome: str, app: Timebell) -> dict[str, Any]:
    at = schedule.next_fire_at
    return {
        "file": name, "line": entry.number, "schedule": schedule.name, "words": schedule.recurrence.describe(),
        "command": entry.command, "next": None if at is None else at.isoformat().replace("+00:00", "Z"),
        "nextLocal": None if at is None else to_local(at, schedule.timezone).isoformat(),
        "in": None if at is None else format_relative(at - app.clock.now()), "outcome": outcome,
    }  # fmt: skip


def _print_rows(rows: list[dict[str, Any]]) -> None:
    head = ("LINE", "SCHEDULE", "WHEN", "NEXT", "IN", "OUTCOME", "COMMAND")
    cells = [
        (str(row["line"]), row["schedule"], row["words"], (row["nextLocal"] or "never").replace("T", " "),
         row["in"] or "", row["outcome"], row["command"][:60])
        for row in rows
    ]  # fmt: skip
    print_table(cells, head)


def _print_notes(crontab: Crontab, name: str) -> None:
    me = getpass.getuser()
    others = sorted({entry.user for entry in crontab.entries if entry.user not in (None, me)}, key=str)
    for number, note in crontab.notes:
        print_message(f"note: line {number}: {note}")
    if others:
        print_message(
            f"warning: entries of {', '.join(map(str, others))} will run as the user of the Timebell process."
        )
    if crontab.entries:
        print_message(DIFFERENCES_FROM_CRON)
    for number, reason in sorted(crontab.refused):
        print_message(f"refused: {name} line {number}: {reason}")
