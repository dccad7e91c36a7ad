"""`timebell import crontab`: turn each entry into a schedule with a stable name.

A command of curl or wget becomes a named http target, if it can be translated exactly; its credentials become secrets.
Every other command becomes a command target.
"""

from __future__ import annotations

import asyncio
import dataclasses
import getpass
import os
import pwd
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from timebell.app import Timebell
from timebell.cli.crontab import Crontab, Entry, has_user_column, parse
from timebell.cli.importers.entry import NotExpressible
from timebell.cli.importers.http_commands import HttpCommand, parse_http_command
from timebell.cli.output import FAILED, OK, print_message, print_records, print_table
from timebell.clock import SystemClock
from timebell.errors import InvalidInput, Refused, TimebellError
from timebell.formatting import format_relative, to_local
from timebell.model.policy import Retry
from timebell.model.schedule import Schedule
from timebell.model.target import fill_secrets, mask_secrets
from timebell.recurrence import Cron
from timebell.settings import Settings, load
from timebell.targets.base import Target
from timebell.targets.webhook_signatures import new_signing_secret
from timebell.wiring import create_target

# cron has no time limit; this one keeps hanging commands from accumulating.
COMMAND_TIMEOUT_SECONDS = 24 * 3600.0
DIFFERENCES_FROM_CRON = (
    "Unlike cron, an entry does not start while its previous run is still running, and after an outage the latest"
    " missed run is executed. Like cron, a failed command is not retried."
)
DIFFERENCES_FROM_CURL = "Requests of curl and wget fail with a status of 400 or above, also without curl's -f."
STAYS_COMMAND = "stays a command: "
_INVALID_NAME_CHARACTER = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True)
class Draft:
    """A schedule to write, and the target and secrets that it needs. Its target has the name of the schedule."""

    entry: Entry
    schedule: Schedule
    options: dict[str, Any] | None = None
    secrets: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def command(self) -> str:
        """The command, without its credentials."""
        masked: str = mask_secrets(self.entry.command, self.secrets.values())
        return masked


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
    requests = _translate_requests(crontab, chosen)
    if not (chosen.command_enabled or dry_run or (requests and len(requests) == len(crontab.entries))):
        if not requests:
            raise Refused(
                "A crontab runs commands, and command targets are disabled.", code="COMMAND_TARGET_OFF",
                fix="Set TIMEBELL_COMMAND_ENABLED=true here and on every node, or use --dry-run first.",
            )  # fmt: skip
        _refuse_commands(crontab, requests)
    app = Timebell(database, timezone=timezone)
    app.settings = dataclasses.replace(app.settings, command_enabled=True)
    rows = asyncio.run(_write_schedules(app, crontab, requests, name, dry_run=dry_run))
    if chosen.output == "table":
        _print_rows(rows)
    else:
        print_records(rows, chosen.output)
    _print_notes(crontab, name)
    if requests:
        print_message(DIFFERENCES_FROM_CURL)
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


def _translate_requests(crontab: Crontab, settings: Settings) -> dict[int, HttpCommand]:
    """Return the requests of curl and wget commands by line number.

    The reasons why others stay commands are added to `crontab.notes`.
    """
    requests: dict[int, HttpCommand] = {}
    target: Target | None = None
    for entry in crontab.entries:
        request = None
        try:
            request = parse_http_command(entry.command, entry.env, entry.stdin)
            if request is not None:
                target = target or create_target("http", settings, SystemClock().now)
                options = {**fill_secrets(request.options, request.secrets), "signingSecrets": [new_signing_secret()]}
                target.check(options)
                requests[entry.number] = request
        except NotExpressible as reason:
            crontab.notes.append((entry.number, f"{STAYS_COMMAND}{reason}."))
        except (InvalidInput, Refused) as error:
            text = mask_secrets(f"{STAYS_COMMAND}{error}", request.secrets.values() if request else ())
            crontab.notes.append((entry.number, text))
    return requests


def _refuse_commands(crontab: Crontab, requests: dict[int, HttpCommand]) -> None:
    """Move the entries without a request to `crontab.refused`, because command targets are disabled."""
    reasons = dict(crontab.notes)
    for entry in crontab.entries:
        if entry.number not in requests:
            reason = reasons.get(entry.number, "It runs a command.").removeprefix(STAYS_COMMAND)
            crontab.refused.append((entry.number, f"{reason} Commands require TIMEBELL_COMMAND_ENABLED=true."))
    refused = {number for number, _ in crontab.refused}
    crontab.notes = [(number, note) for number, note in crontab.notes if number not in refused]
    crontab.entries = [entry for entry in crontab.entries if entry.number in requests]


def _draft_schedules(app: Timebell, crontab: Crontab, requests: dict[int, HttpCommand]) -> list[Draft]:
    """Build and validate the schedules; invalid entries are added to `crontab.refused`."""
    now, me = app.clock.now(), getpass.getuser()
    drafts = []
    for entry in crontab.entries:
        name, request = f"crontab-{entry.user or me}-{entry.fingerprint}", requests.get(entry.number)
        options: dict[str, Any] = {"name": name, "timezone": entry.timezone}
        if request is None:
            options |= {
                "target": {"kind": "command", **_command_options(entry)}, "retry": Retry(attempts=1),
                "timeout": COMMAND_TIMEOUT_SECONDS,
            }  # fmt: skip
            target_options, secrets = None, {}
        else:
            name = _INVALID_NAME_CHARACTER.sub("-", name)
            options |= {"target": name, "retry": request.retry}
            secrets = {f"{name}-{secret}": value for secret, value in request.secrets.items()}
            target_options = fill_secrets(request.options, {
                secret: {"secret": f"{name}-{secret}"} for secret in request.secrets  # type: ignore[misc]
            })  # fmt: skip
        line = mask_secrets(entry.line, secrets.values())
        options["metadata"] = {"crontab": {"user": entry.user or me, "line": line}}
        try:
            schedule = app.schedules.draft("crontab.run", Cron(entry.expression), options, now)
            drafts.append(Draft(entry, schedule, target_options, secrets))
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


async def _write_schedules(
    app: Timebell, crontab: Crontab, requests: dict[int, HttpCommand], name: str, *, dry_run: bool
) -> list[dict[str, Any]]:
    """Write targets and schedules, and return one row per schedule. A dry run does not open the database."""
    if dry_run:
        drafts = _draft_schedules(app, crontab, requests)
        return [_row(name, draft, draft.schedule, "would be created", app) for draft in drafts]
    rows = []
    try:
        await app.open()  # from here on, app.clock follows the database clock
        for draft in _draft_schedules(app, crontab, requests):
            target_changed = draft.options is not None and await _write_target(app, draft)
            stored = await app.schedules.put(draft.schedule, replace=True)
            changed = "changed" if target_changed or stored.updated_at >= draft.schedule.updated_at else "unchanged"
            rows.append(_row(name, draft, stored, "created" if stored.id == draft.schedule.id else changed, app))
    finally:
        await app.close()
    return rows


async def _write_target(app: Timebell, draft: Draft) -> bool:
    """Write the secrets and the target of a request; return whether the target was new or changed."""
    assert draft.options is not None
    for name, value in draft.secrets.items():
        await app.secrets.put(name, value)
    target = await app.targets.put(str(draft.schedule.action.target["name"]), "http", draft.options)  # type: ignore[index]
    return target.updated_at >= draft.schedule.updated_at


def _row(name: str, draft: Draft, schedule: Schedule, outcome: str, app: Timebell) -> dict[str, Any]:
    at = schedule.next_fire_at
    return {
        "file": name, "line": draft.entry.number, "schedule": schedule.name, "words": schedule.recurrence.describe(),
        "target": "command" if draft.options is None else "http", "command": draft.command,
        "next": None if at is None else at.isoformat().replace("+00:00", "Z"),
        "nextLocal": None if at is None else to_local(at, schedule.timezone).isoformat(),
        "in": None if at is None else format_relative(at - app.clock.now()), "outcome": outcome,
    }  # fmt: skip


def _print_rows(rows: list[dict[str, Any]]) -> None:
    head = ("LINE", "SCHEDULE", "WHEN", "NEXT", "IN", "OUTCOME", "TARGET", "COMMAND")
    cells = [
        (str(row["line"]), row["schedule"], row["words"], (row["nextLocal"] or "never").replace("T", " "),
         row["in"] or "", row["outcome"], row["target"], row["command"][:60])
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
