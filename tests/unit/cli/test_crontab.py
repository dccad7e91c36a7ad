"""Parsing and importing crontabs."""

from __future__ import annotations

import asyncio
import getpass
import json
from pathlib import Path

import pytest

from timebell import Timebell
from timebell.cli.crontab import Crontab, has_user_column, parse
from timebell.model.schedule import Schedule

from .conftest import Cli

DEBIAN = Path(__file__).parents[3] / "examples" / "crontab"
KNOWN = {"root", "www-data", "backup"}


def parse_text(text: str, *, system: bool = False) -> Crontab:
    return parse(text, system=system)


def test_system_crontab_of_debian_is_parsed() -> None:
    found = parse_text(DEBIAN.read_text(), system=True)
    assert [entry.expression for entry in found.entries] == [
        "17 * * * *", "25 6 * * *", "47 6 * * 7", "52 6 1 * *", "*/5 * * * *",
    ]  # fmt: skip
    assert {entry.user for entry in found.entries} == {"root"}
    assert found.entries[0].command == "cd / && run-parts --report /etc/cron.hourly"
    assert found.entries[0].shell == "/bin/sh"
    assert found.entries[0].env["PATH"].startswith("/usr/local/sbin:")
    assert "\\%" not in found.entries[4].command
    assert "%F %T" in found.entries[4].command
    assert not found.refused


def test_assignments_apply_to_later_lines() -> None:
    found = parse_text("A=1\n* * * * * one\nA = \"two words \"\nB='x'\nSHELL=/bin/bash\nC =\n* * * * * two\n")
    one, two = found.entries
    assert one.env == {"A": "1"}
    assert (one.shell, two.shell) == ("/bin/sh", "/bin/bash")
    assert two.env == {"A": "two words ", "B": "x", "SHELL": "/bin/bash", "C": ""}


def test_timezone_comes_from_cron_tz_not_from_tz() -> None:
    found = parse_text("* * * * * a\nTZ=Asia/Tokyo\nCRON_TZ=Asia/Seoul\n* * * * * b\nCRON_TZ=\n* * * * * c\n")
    assert [entry.timezone for entry in found.entries] == [None, "Asia/Seoul", None]
    assert found.entries[1].env == {"TZ": "Asia/Tokyo"}


@pytest.mark.parametrize(
    ("written", "command", "stdin"),
    [
        ("mail -s hi joe%Joe,%%Where are you?", "mail -s hi joe", "Joe,\n\nWhere are you?\n"),
        (r"date +\%F", "date +%F", ""),
        (r"cat > x\%y%100\%", "cat > x%y", "100%\n"),
        ("echo # not a comment", "echo # not a comment", ""),
        ("A=1 env", "A=1 env", ""),
    ],
)
def test_percent_signs_separate_stdin(written: str, command: str, stdin: str) -> None:
    (entry,) = parse_text(f"5 4 * * sun {written}").entries
    assert (entry.command, entry.stdin) == (command, stdin)


def test_macros_and_lines_with_a_leading_dash() -> None:
    found = parse_text("@daily  a b\n@Hourly c\n-0 5 * * * d\n")
    assert [(entry.expression, entry.command) for entry in found.entries] == [
        ("@daily", "a b"), ("@Hourly", "c"), ("0 5 * * *", "d"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "why"),
    [("@reboot x", "not a time"), ("@fortnightly x", "crontab(5)"), ("@every 5m x", "crontab(5)"),
     ("1 2 3 4 5", "fields"), ("@daily", "fields"), ("0~30 * * * * x", "random")],
)  # fmt: skip
def test_refused_lines_have_a_reason(line: str, why: str) -> None:
    found = parse_text(f"# a comment\n\n  {line}\n")
    ((number, reason),) = found.refused
    assert number == 3
    assert why in reason
    assert not found.entries


def test_mailto_is_reported_as_not_imported() -> None:
    assert [number for number, _ in parse_text('MAILTO=root\n* * * * * x\nMAILTO=""\n').notes] == [1]


def test_fingerprints_are_stable_and_differ_for_repeated_lines() -> None:
    once = parse_text("0 1 * * * a\n0 1 * * * a\n0 2 * * * a\n").entries
    assert len({entry.fingerprint for entry in once}) == 3
    again = parse_text("# new\n0 2 * * * a\nX=1\n0 1 * * * a\n").entries
    assert again[1].fingerprint == once[0].fingerprint
    assert again[0].fingerprint == once[2].fingerprint


@pytest.mark.parametrize(
    ("text", "path", "system"),
    [
        ("0 1 * * * operator x", "/etc/crontab", True),
        ("0 1 * * * operator x", "/etc/cron.d/it", True),
        ("# m h dom mon dow user\tcommand\n0 1 * * * operator x", "c", True),
        ("0 1 * * * root x\n@daily www-data y z", "c", True),
        ("0 1 * * * root x\n0 1 * * * /usr/bin/tar -z x", "c", False),
        ("0 1 * * * backup", "c", False),
        ("# m h  dom mon dow   command\n0 1 * * * tar -zcf x", "c", False),
        ("# nothing", "c", False),
    ],
)
def test_user_column_is_detected(text: str, path: str, system: bool) -> None:
    assert has_user_column(text, path, KNOWN.__contains__) is system


def stored(folder: Path) -> list[Schedule]:
    async def read() -> list[Schedule]:
        app = Timebell(f"sqlite:///{folder}/timebell.db")
        try:
            return list((await app.schedules.list(None, 100, None)).items)
        finally:
            await app.close()

    return asyncio.run(read())


def test_a_dry_run_shows_everything_and_writes_nothing(cli: Cli, tmp_path: Path) -> None:
    done = cli("import", "crontab", DEBIAN, "--timezone", "Asia/Seoul", "--dry-run", "-o", "json")
    rows = json.loads(done.out)
    assert done.code == 0
    assert [row["line"] for row in rows] == [
        entry.number for entry in parse_text(DEBIAN.read_text(), system=True).entries
    ]
    assert {row["outcome"] for row in rows} == {"would be created"}
    assert rows[2]["words"] == "At 06:47 on Sunday, Asia/Seoul"
    assert all(row["nextLocal"].endswith("+09:00") and row["next"].endswith("Z") for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_import_requires_the_command_target_to_be_enabled(cli: Cli, tmp_path: Path) -> None:
    done = cli("import", "crontab", DEBIAN, "--timezone", "Asia/Seoul")
    assert done.code == 4
    assert "TIMEBELL_COMMAND_ENABLED=true" in done.err
    assert list(tmp_path.iterdir()) == []


def test_import_creates_schedules_and_repeating_it_changes_nothing(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIMEBELL_COMMAND_ENABLED", "true")
    monkeypatch.setenv("TZ", "America/Lima")
    (tmp_path / "mine").write_text("MAILTO=me\nCRON_TZ=Asia/Seoul\nX=y\n0 9 * * 1-5 cat > out%hello\n@reboot boot\n")
    done = cli("import", "crontab", "mine", "-o", "json")
    assert done.code == 1  # one line was refused
    assert "line 5: @reboot is not a time" in done.err
    assert "MAILTO is not imported" in done.err
    (row,) = json.loads(done.out)
    assert row["outcome"] == "created"
    (schedule,) = stored(tmp_path)
    assert schedule.name == row["schedule"]
    assert schedule.name.startswith(f"crontab-{getpass.getuser()}-")
    assert schedule.timezone == "Asia/Seoul"
    assert schedule.action.target is not None
    options = schedule.action.target["options"]
    assert options["argv"] == ["/bin/sh", "-c", "cat > out"]
    assert options["stdin"] == "hello\n"
    assert options["env"]["X"] == "y"
    assert options["env"]["LOGNAME"] == getpass.getuser()
    assert schedule.action.retry is not None
    assert schedule.action.retry.attempts == 1  # cron tries once

    again = json.loads(cli("import", "crontab", "mine", "-o", "json").out)
    assert [row["outcome"] for row in again] == ["unchanged"]
    assert stored(tmp_path)[0].revision == 1
    (tmp_path / "mine").write_text("CRON_TZ=Asia/Tokyo\nX=y\n0 9 * * 1-5 cat > out%hello\n")
    assert json.loads(cli("import", "crontab", "mine", "-o", "json").out)[0]["outcome"] == "changed"
    assert stored(tmp_path)[0].revision == 2


def test_a_crontab_without_a_zone_is_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    done = cli("import", "crontab", DEBIAN, "--dry-run")
    assert (done.code, done.out) == (2, "")
    assert "CRON_TZ" in done.err


def test_invalid_lines_do_not_prevent_the_import_of_valid_lines(cli: Cli) -> None:
    text = "61 * * * * a\n0 0 31 2 * b\n0 9 * * * c\nCRON_TZ=Nowhere/Land\n0 9 * * * d\n"
    done = cli("import", "crontab", "-", "--timezone", "UTC", "--dry-run", "-o", "json", stdin=text)
    assert [row["command"] for row in json.loads(done.out)] == ["c"]
    assert done.code == 1
    for number, code in ((1, "INVALID_CRON"), (2, "NEVER_FIRES"), (5, "INVALID_TIMEZONE")):
        assert any(f"line {number}:" in line and code in line for line in done.err.splitlines())


def test_user_of_a_system_crontab_is_kept_in_the_name_with_a_warning(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "system").write_text("0 9 * * * nobody-here /bin/true\n")
    done = cli("import", "crontab", "system", "--system", "--timezone", "UTC", "--dry-run", "-o", "json")
    (row,) = json.loads(done.out)
    assert row["schedule"].startswith("crontab-nobody-here-")
    assert row["command"] == "/bin/true"
    assert "nobody-here" in done.err


def test_table_for_a_terminal_has_its_columns(cli: Cli) -> None:
    done = cli("import", "crontab", DEBIAN, "--timezone", "Asia/Seoul", "--dry-run")
    assert done.out.splitlines()[0].split() == [
        "LINE",
        "SCHEDULE",
        "WHEN",
        "NEXT",
        "IN",
        "OUTCOME",
        "TARGET",
        "COMMAND",
    ]
    assert "system form" in done.err


def test_missing_file_is_refused_and_an_empty_file_imports_nothing(cli: Cli) -> None:
    assert cli("import", "crontab", "none", "--timezone", "UTC", "--dry-run").code == 2
    done = cli("import", "crontab", "-", "--timezone", "UTC", "--dry-run", "-o", "json", stdin="# nothing\n")
    assert (done.code, done.out.strip()) == (0, "[]")
