"""Parse crontabs in the format of crontab(5) and cronie, without using the store or the time zone of this host."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

from timebell.recurrence.cron.parser import MACROS

ASSIGNMENT = re.compile(r"""\s*(?P<name>"[^"]*"|'[^']*'|[A-Za-z_]\w*)\s*=\s*(?P<value>.*?)\s*""", re.ASCII)
USER_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}\$?")
USER_COLUMN_HEADING = re.compile(r"^#.*\buser(-name)?\b.*\bcommand\b", re.MULTILINE | re.IGNORECASE)
CRON_SETTINGS = ("CRON_TZ", "MAILTO", "MAILFROM", "RANDOM_DELAY", "CONTENT_TYPE")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line that runs a command. `shell`, `env` and `timezone` are those that the lines above it set.

    `fingerprint` is a hash of the line and, for repeated lines, of its occurrence number.
    """

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
    """A parsed file: entries, refused lines and unsupported settings, the latter two as (line number, reason)."""

    system: bool
    entries: list[Entry] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)


def parse(text: str, *, system: bool) -> Crontab:
    """Parse a crontab, in the system form (with a user column) or the user form."""
    crontab = Crontab(system)
    env: dict[str, str] = {}
    line_counts: dict[str, int] = {}
    for number, raw_line in enumerate(text.splitlines(), 1):
        line = raw_line.strip()
        if not line or line.startswith("#"):
            continue
        assignment = ASSIGNMENT.fullmatch(line)
        if assignment is not None:
            name, value = _strip_quotes(assignment["name"]), _strip_quotes(assignment["value"])
            env[name] = value
            if name in ("MAILTO", "RANDOM_DELAY") and value:
                crontab.notes.append((number, _UNSUPPORTED_SETTINGS[name]))
            continue
        line_counts[line] = line_counts.get(line, 0) + 1
        entry = _parse_entry(number, line, line_counts[line], env, crontab)
        if isinstance(entry, str):
            crontab.refused.append((number, entry))
        else:
            crontab.entries.append(entry)
    return crontab


_UNSUPPORTED_SETTINGS = {
    "MAILTO": "MAILTO is not imported: output and exit code are stored with each job instead.",
    "RANDOM_DELAY": "RANDOM_DELAY is not imported: entries start at their exact times.",
}


def _parse_entry(number: int, line: str, occurrence_number: int, env: dict[str, str], crontab: Crontab) -> Entry | str:
    """Return the entry of a line, or the reason why the line is refused."""
    if line[0] == "-" and line[1:2] not in ("", " "):  # cronie: a leading - turns off logging of this entry
        line = line[1:]
    width = 1 if line.startswith("@") else 5
    parts = line.split(None, width + crontab.system)
    if len(parts) <= width + crontab.system:
        required = "time, user and command" if crontab.system else "time and command"
        return f"The line has {len(parts)} fields; {required} are required."
    expression, user = " ".join(parts[:width]), parts[width] if crontab.system else None
    if expression.lower() == "@reboot":
        return "@reboot is not a time: use your service manager (systemd, an init script)."
    if width == 1 and expression.lower() not in MACROS:
        return f"{expression} is not a macro of crontab(5)."
    if "~" in expression:
        return "~ picks a new random time on every start of cron: specify a fixed time."
    command, stdin = _split_stdin(parts[-1])
    command_env = {name: value for name, value in env.items() if name not in CRON_SETTINGS}
    identity = f"{line}#{occurrence_number}" if occurrence_number > 1 else line
    return Entry(
        number, line, expression, user, command, stdin, command_env.get("SHELL") or "/bin/sh", command_env,
        env.get("CRON_TZ") or None, sha256(identity.encode()).hexdigest()[:12],
    )  # fmt: skip


def _split_stdin(text: str) -> tuple[str, str]:
    r"""Split into command and stdin: the text after the first `%`; further `%` are newlines, `\%` is a literal `%`."""
    parts = [part.replace("\\%", "%") for part in re.split(r"(?<!\\)%", text)]
    return parts[0].strip(), "".join(f"{part}\n" for part in parts[1:])


def _strip_quotes(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def has_user_column(text: str, path: str, is_user: Callable[[str], bool]) -> bool:
    """Return whether it is a system crontab: by its path, its heading, or because every sixth field is a local user."""
    if path == "/etc/crontab" or path.startswith("/etc/cron.d/"):
        return True
    if USER_COLUMN_HEADING.search(text):
        return True
    users = []
    for line in map(str.strip, text.splitlines()):
        if line and not line.startswith("#") and not ASSIGNMENT.fullmatch(line):
            width = 1 if line.startswith("@") else 5
            parts = line.split(None, width + 1)
            users.append(parts[width] if len(parts) > width + 1 else "")
    return bool(users) and all(USER_NAME.fullmatch(user) and is_user(user) for user in users)
