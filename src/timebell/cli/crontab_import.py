"""`timebell import crontab`: each entry becomes a schedule with the command target, under a stable name."""

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
from timebell.cli.output import FAILED, OK, emit, say, table
from timebell.errors import InvalidInput, Refused, TimebellError
from timebell.formatting import local, relative
from timebell.model.policy import Retry
from timebell.model.schedule import Schedule
from timebell.recurrence import Cron
from timebell.settings import load

LONGEST = 24 * 3600.0  # seconds a command may run; cron has no limit, but a leak of processes is no service
UNLIKE_CRON = (
    "Unlike cron: an entry does not start while its last run goes on, and after an outage the latest missed run"
    " is made up for. As with cron, a failed command is not tried again."
)


def take(file: Path | None, timezone: str | None, database: str | None, form: str | None, *, system: bool | None,
         dry_run: bool) -> int:  # fmt: skip
    """Read, show and, unless it is a dry run, write; the exit code. Raises TimebellError."""
    chosen = load(database_url=database, default_timezone=timezone, output=form)
    text, name, system = _read(file, system)
    found = parse(text, system=system)
    if not (chosen.command_enabled or dry_run):
        raise Refused(
            "A crontab runs commands, and running commands is off.", code="COMMAND_TARGET_OFF",
            fix="Set TIMEBELL_COMMAND_ENABLED=true, here and where Timebell runs; or look first with --dry-run.",
        )  # fmt: skip
    app = Timebell(database, timezone=timezone)
    app.settings = dataclasses.replace(app.settings, command_enabled=True)
    rows = asyncio.run(_make(app, found, name, dry_run=dry_run))
    if chosen.output == "table":
        _print(rows)
    else:
        emit(rows, chosen.output)
    _talk(found, name)
    return FAILED if found.refused else OK


def _read(file: Path | None, system: bool | None) -> tuple[str, str, bool]:
    """The text, where it is from, and whether it has a user column."""
    if file is None:
        return _own(), "crontab -l", bool(system)
    try:
        raw = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as failed:
        raise InvalidInput(f"{file} cannot be read: {failed}.", code="FILE_UNREADABLE") from failed
    if system is None:
        system = has_user_column(text, str(file.absolute()), _is_user)
        form = "system form, with a user column" if system else "user form, without a user column"
        say(f"Read as {form}. If that is wrong, add {'--user' if system else '--system'}.")
    return text, str(file), system


def _own() -> str:
    """The crontab of this user."""
    try:
        done = subprocess.run(["crontab", "-l"], capture_output=True, text=True, check=False, timeout=30)  # noqa: S607
    except (OSError, subprocess.TimeoutExpired) as failed:
        raise InvalidInput("There is no crontab command here.", code="FILE_UNREADABLE", fix="Name a file.") from failed
    if done.returncode:
        raise InvalidInput(f"crontab -l: {done.stderr.strip()}.", code="FILE_UNREADABLE", fix="Name a file.")
    return done.stdout


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _drafts(app: Timebell, found: Crontab) -> list[tuple[Entry, Schedule]]:
    """The schedules, checked; what cannot be one joins the refused lines."""
    now, me = app.clock.now(), getpass.getuser()
    drafts = []
    for entry in found.entries:
        options: dict[str, Any] = {
            "name": f"crontab-{entry.user or me}-{entry.fingerprint}", "timezone": entry.timezone,
            "target": {"kind": "command", **_command(entry)}, "retry": Retry(attempts=1), "timeout": LONGEST,
            "metadata": {"crontab": {"user": entry.user or me, "line": entry.line}},
        }  # fmt: skip
        try:
            drafts.append((entry, app.schedules.draft("crontab.run", Cron(entry.expression), options, now)))
        except TimebellError as bad:
            if bad.code == "TIMEZONE_MISSING":
                raise InvalidInput(
                    "A crontab does not say its time zone, and this host's is never used.", code="TIMEZONE_MISSING",
                    fix="Add --timezone Asia/Seoul, or CRON_TZ=Asia/Seoul to the file.",
                ) from bad  # fmt: skip
            found.refused.append((entry.number, f"{bad} ({bad.code})"))
    return drafts


def _command(entry: Entry) -> dict[str, Any]:
    """How cron would run it: a shell, HOME and LOGNAME, in the home folder."""
    home = os.path.expanduser("~")
    env = {"HOME": home, "LOGNAME": getpass.getuser(), "SHELL": entry.shell, **entry.env}
    made: dict[str, Any] = {"argv": [entry.shell, "-c", entry.command], "env": env, "stdin": entry.stdin}
    return made | ({"cwd": env["HOME"]} if os.path.isdir(env["HOME"]) else {})


async def _make(app: Timebell, found: Crontab, name: str, *, dry_run: bool) -> list[dict[str, Any]]:
    """The schedules as rows to show, written unless it is a dry run, which does not even look at the database."""
    if dry_run:
        return [_row(name, entry, draft, "would be made", app) for entry, draft in _drafts(app, found)]
    rows = []
    try:
        await app.open()  # from here on, now is the database's
        for entry, draft in _drafts(app, found):
            kept = await app.schedules.put(draft, replace=True)
            changed = "changed" if kept.updated_at >= draft.updated_at else "unchanged"
            rows.append(_row(name, entry, kept, "made" if kept.id == draft.id else changed, app))
    finally:
        await app.close()
    return rows


def _row(name: str, entry: Entry, schedule: Schedule, outcome: str, app: Timebell) -> dict[str, Any]:
    at = schedule.next_fire_at
    return {
        "file": name, "line": entry.number, "schedule": schedule.name, "words": schedule.recurrence.describe(),
        "command": entry.command, "next": None if at is None else at.isoformat().replace("+00:00", "Z"),
        "nextLocal": None if at is None else local(at, schedule.timezone).isoformat(),
        "in": None if at is None else relative(at - app.clock.now()), "outcome": outcome,
    }  # fmt: skip


def _print(rows: list[dict[str, Any]]) -> None:
    head = ("LINE", "SCHEDULE", "WHEN", "NEXT", "IN", "OUTCOME", "COMMAND")
    shown = [
        (str(row["line"]), row["schedule"], row["words"], (row["nextLocal"] or "never").replace("T", " "),
         row["in"] or "", row["outcome"], row["command"][:60])
        for row in rows
    ]  # fmt: skip
    table(shown, head)


def _talk(found: Crontab, name: str) -> None:
    me = getpass.getuser()
    others = sorted({entry.user for entry in found.entries if entry.user not in (None, me)}, key=str)
    for number, note in found.notes:
        say(f"note: line {number}: {note}")
    if others:
        say(f"warning: entries of {', '.join(map(str, others))} will run as the user that runs Timebell.")
    if found.entries:
        say(UNLIKE_CRON)
    for number, why in sorted(found.refused):
        say(f"refused: {name} line {number}: {why}")
