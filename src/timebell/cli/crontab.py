"""Crontabs, as crontab(5) and cronie write them: text in, entries out. Knows no store and no zone of this host."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

from timebell.recurrence.cron.parser import MACROS

ASSIGNMENT = re.compile(r"""\s*(?P<name>"[^"]*"|'[^']*'|[A-Za-z_]\w*)\s*=\s*(?P<value>.*?)\s*""", re.ASCII)
USER_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}\$?")
HEADING = re.compile(r"^#.*\buser(-name)?\b.*\bcommand\b", re.MULTILINE | re.IGNORECASE)
NOT_ENVIRONMENT = ("CRON_TZ", "MAILTO", "MAILFROM", "RANDOM_DELAY", "CONTENT_TYPE")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line that runs something. `shell`, `env` and `timezone` are as the lines above it set them."""

    number: int
    line: str
    expression: str
    user: str | None
    command: str
    stdin: str
    shell: str
    env: dict[str, str]
    timezone: str | None
    fingerprint: str


@dataclass(slots=True)
class Crontab:
    """What a file says: its entries, what is refused (line number, why) and what is not carried over."""

    system: bool
    entries: list[Entry] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)


def parse(text: str, *, system: bool) -> Crontab:
    """Read a crontab, in the system form (with a user column) or the user form."""
    found = Crontab(system)
    env: dict[str, str] = {}
    seen: dict[str, int] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        assignment = ASSIGNMENT.fullmatch(line)
        if assignment is not None:
            name, value = _unquoted(assignment["name"]), _unquoted(assignment["value"])
            env[name] = value
            if name in ("MAILTO", "RANDOM_DELAY") and value:
                found.notes.append((number, _NOT_CARRIED[name]))
            continue
        seen[line] = seen.get(line, 0) + 1
        entry = _entry(number, line, seen[line], env, found)
        if isinstance(entry, str):
            found.refused.append((number, entry))
        else:
            found.entries.append(entry)
    return found


_NOT_CARRIED = {
    "MAILTO": "MAILTO is not carried over: output and exit code are kept with each job instead.",
    "RANDOM_DELAY": "RANDOM_DELAY is not carried over: entries start at their exact times.",
}


def _entry(number: int, line: str, repeated: int, env: dict[str, str], found: Crontab) -> Entry | str:
    """An entry, or why it is none."""
    if line[0] == "-" and line[1:2] not in ("", " "):  # cronie: do not log this one
        line = line[1:]
    width = 1 if line.startswith("@") else 5
    parts = line.split(None, width + found.system)
    if len(parts) <= width + found.system:
        return f"It has {len(parts)} fields; {'time, user and' if found.system else 'time and'} command are needed."
    expression, user = " ".join(parts[:width]), parts[width] if found.system else None
    if expression.lower() == "@reboot":
        return "@reboot is no time: start it with your service manager (systemd, an init script)."
    if width == 1 and expression.lower() not in MACROS:
        return f"{expression} is not a name for times that crontab(5) knows."
    if "~" in expression:
        return "~ picks a random time, a new one on every start: write the time you want."
    command, stdin = _split(parts[-1])
    given = {name: value for name, value in env.items() if name not in NOT_ENVIRONMENT}
    mark = f"{line}#{repeated}" if repeated > 1 else line
    return Entry(
        number, line, expression, user, command, stdin, given.get("SHELL") or "/bin/sh", given,
        env.get("CRON_TZ") or None, sha256(mark.encode()).hexdigest()[:12],
    )  # fmt: skip


def _split(text: str) -> tuple[str, str]:
    r"""The command and what it reads: everything after the first `%`, further ones are new lines, `\%` is `%`."""
    parts = [part.replace("\\%", "%") for part in re.split(r"(?<!\\)%", text)]
    return parts[0].strip(), "".join(f"{part}\n" for part in parts[1:])


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def has_user_column(text: str, path: str, known: Callable[[str], bool]) -> bool:
    """Whether it is a system crontab: by its place, its heading, or because each sixth field is a user here."""
    if path == "/etc/crontab" or path.startswith("/etc/cron.d/"):
        return True
    if HEADING.search(text):
        return True
    users = []
    for line in map(str.strip, text.splitlines()):
        if line and not line.startswith("#") and not ASSIGNMENT.fullmatch(line):
            width = 1 if line.startswith("@") else 5
            parts = line.split(None, width + 1)
            users.append(parts[width] if len(parts) > width + 1 else "")
    return bool(users) and all(USER_NAME.fullmatch(user) and known(user) for user in users)
