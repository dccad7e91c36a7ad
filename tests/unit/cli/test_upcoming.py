"""`timebell next`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from .conftest import Cli, Start

FROM = ("--from", "2027-03-13T00:00:00Z")


def test_description_fires_and_clock_changes_are_printed(cli: Cli) -> None:
    done = cli("next", "30 2 * * *", "--timezone", "America/New_York", "--count", 3, *FROM)
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0] == "At 02:30, America/New_York"
    assert "Sat 13 Mar 2027 02:30:00 EST" in lines[1]
    assert "2027-03-13T07:30:00Z" in lines[1]
    assert "Sun 14 Mar 2027 03:00:00 EDT" in lines[2]
    assert "the clock skips" in lines[2]
    assert any(line.startswith("! 02:30 does not exist on Sun 14 Mar 2027") for line in lines)
    assert done.err == ""


def test_json_output_is_a_list_of_fires(cli: Cli) -> None:
    done = cli("next", "30 2 * * *", "--timezone", "America/New_York", "--count", 2, *FROM, "-o", "json")
    assert json.loads(done.out) == [
        {"utc": "2027-03-13T07:30:00Z", "local": "2027-03-13T02:30:00-05:00", "note": None},
        {"utc": "2027-03-14T07:00:00Z", "local": "2027-03-14T03:00:00-04:00", "note": "gap"},
    ]
    assert "does not exist" in done.err


def test_h_without_a_name_is_only_an_example(cli: Cli) -> None:
    done = cli("next", "H 2 * * *", "--timezone", "UTC", "--count", 1, *FROM)
    assert done.code == 0
    assert done.out.startswith("At 02:")
    assert "! The minute depends on the schedule's name (H)" in done.out


def test_yaml_and_csv_output(cli: Cli) -> None:
    base = ("next", "0 9 * * *", "--timezone", "Asia/Seoul", "--count", 1, "--from", "2027-01-01T00:00")
    assert cli(*base, "-o", "csv").out == "utc,local,note\n2027-01-01T00:00:00Z,2027-01-01T09:00:00+09:00,\n"
    assert cli(*base, "-o", "yaml").out == (
        '- utc: "2027-01-01T00:00:00Z"\n  local: "2027-01-01T09:00:00+09:00"\n  note: null\n'
    )


@pytest.mark.parametrize(
    "arguments", [("--every", "PT90M"), ("PT90M",), ("@every 90m",), ("--every", "R/2027-03-13T00:00:00Z/PT90M")]
)
def test_interval_notations_are_equivalent(arguments: tuple[str, ...], cli: Cli) -> None:
    done = cli("next", *arguments, "--timezone", "Asia/Seoul", "--count", 2, *FROM, "-o", "json")
    assert [each["utc"] for each in json.loads(done.out)] == ["2027-03-13T01:30:00Z", "2027-03-13T03:00:00Z"]


def test_stdin_mode_answers_each_line(cli: Cli) -> None:
    requests = [
        {"kind": "cron", "spec": "0 0 9 * * *", "tz": "Asia/Seoul", "start": "2027-01-01T00:00:00Z", "count": 2},
        {"kind": "interval", "spec": "R/2027-01-01T00:00/P1D", "tz": "UTC", "start": "2027-01-05T00:00Z", "count": 1},
        {"kind": "cron", "spec": "nonsense", "tz": "UTC", "start": "2027-01-01T00:00:00Z", "count": 2},
    ]  # fmt: skip
    done = cli("next", "--stdin", stdin="\n".join(map(json.dumps, requests)) + "\n\nnot json\n")
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert answers[0] == ["2027-01-02T00:00:00Z", "2027-01-03T00:00:00Z"]
    assert answers[1] == ["2027-01-06T00:00:00Z"]
    assert "error" in answers[2]
    assert "error" in answers[3]
    assert done.code == 0


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("0 9 * * *",), "TIMEZONE_MISSING"),
        (("0 9 * *", "--timezone", "UTC"), "INVALID_CRON"),
        (("0 9 31 2 *", "--timezone", "UTC"), "NEVER_FIRES"),
        (("0 9 * * *", "--timezone", "EST"), "INVALID_TIMEZONE"),
        (("0 9 * * *", "--timezone", "Asia/Soul"), "INVALID_TIMEZONE"),
        (("--timezone", "UTC"), "RECURRENCE_MISSING"),
        (("0 9 * * *", "--every", "PT1H", "--timezone", "UTC"), "RECURRENCE_MISSING"),
        (("--every", "often", "--timezone", "UTC"), "INVALID_INTERVAL"),
    ],
)
def test_invalid_input_prints_the_problem_a_fix_and_a_code(args: tuple[str, ...], code: str, cli: Cli) -> None:
    done = cli("next", *args)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert f"code: {code}" in done.err


def test_invalid_from_is_refused(cli: Cli) -> None:
    done = cli("next", "0 9 * * *", "--timezone", "UTC", "--from", "tomorrow")
    assert done.code == 2
    assert "--from" in done.err


def test_default_timezone_comes_from_the_settings(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIMEBELL_DEFAULT_TIMEZONE", "Asia/Seoul")
    monkeypatch.setenv("TIMEBELL_OUTPUT", "json")
    monkeypatch.setenv("TZ", "America/Lima")
    fires = json.loads(cli("next", "0 9 * * *", "--count", 1, *FROM).out)
    assert fires[0]["utc"] == "2027-03-14T00:00:00Z"


def test_expression_beyond_the_last_year_never_fires(cli: Cli) -> None:
    done = cli("next", "0 9 * * *", "--timezone", "UTC", "--from", "2199-12-31T23:00:00Z")
    assert (done.code, "never fires" in done.out) == (0, True)


def test_output_to_a_file_has_no_colors(start: Start) -> None:
    process = start("next", "* * * * *", "--timezone", "UTC", "--count", "1")
    assert process.wait() == 0
    assert "\x1b" not in process.out.read_text()  # not a terminal: no colors


def test_help_imports_no_heavy_library() -> None:
    code = (
        "import sys, timebell.cli.main as m; sys.argv = ['timebell', '--help']\n"
        "try: m.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'sqlalchemy', 'asyncpg', 'fastapi', 'rich', 'pydantic', 'jinja2', 'orjson'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Exit codes" in done.stdout


def test_rrule_is_recognized_by_option_and_by_syntax(cli: Cli) -> None:
    rule = "FREQ=MONTHLY;BYDAY=-1FR;BYHOUR=9;BYMINUTE=0;BYSECOND=0"
    for words in (("--rrule", rule), (rule,), (f"DTSTART:20270101T000000\\nRRULE:{rule}",)):
        done = cli("next", *words, "--timezone", "Europe/Paris", "--count", 1, *FROM, "-o", "json")
        assert [fire["utc"] for fire in json.loads(done.out)] == ["2027-03-26T08:00:00Z"]
    assert cli("next", "--rrule", rule, "--every", "P1D", "--timezone", "UTC").code == 2


def test_a_missing_expression_is_reported_before_a_missing_time_zone(cli: Cli) -> None:
    done = cli("next")
    assert (done.code, "RECURRENCE_MISSING" in done.err) == (2, True)
    assert "TIMEZONE_MISSING" in cli("next", "0 9 * * *").err
