"""`timebell db`, `doctor` and `version`."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import Postgres, free_port
from timebell.store.version import HEAD

from .conftest import Cli

UNREACHABLE_URL = "postgresql://me:hunter2@127.0.0.1:1/db"


@pytest.fixture
def new_url(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> Iterator[str]:
    """A database without tables."""
    if kind == "sqlite":
        yield f"sqlite:///{tmp_path}/new.db"
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = server.create_database()
    yield url
    server.drop_database(url)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_upgrade_creates_the_schema_that_check_finds_missing(new_url: str, cli: Cli) -> None:
    at = ("--database", new_url)
    assert json.loads(cli("db", "status", *at, "-o", "json").out)["schema"] is None
    checked = cli("db", "upgrade", "--check", *at)
    assert checked.code == 7
    assert "timebell db upgrade" in checked.err
    assert cli("db", "upgrade", *at).code == 0
    assert cli("db", "upgrade", "--check", *at).code == 0
    again = cli("db", "upgrade", *at)
    assert (again.code, "already" in again.err) == (0, True)
    assert json.loads(cli("db", "status", *at, "-o", "json").out) | {"database": ""} == {
        "database": "", "schema": HEAD, "needed": HEAD, "current": True,
    }  # fmt: skip


def test_read_only_commands_create_no_file(cli: Cli, tmp_path: Path) -> None:
    for command in (("db", "status"), ("db", "upgrade", "--check"), ("doctor",)):
        cli(*command)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [("db", "status"), ("db", "upgrade"), ("db", "upgrade", "--check")])
def test_unreachable_database_is_reported_without_its_password(command: tuple[str, ...], cli: Cli) -> None:
    done = cli(*command, "--database", UNREACHABLE_URL)
    assert done.code == 6
    assert "DATABASE_UNREACHABLE" in done.err
    assert "hunter2" not in done.err + done.out


def test_unsupported_database_is_refused(cli: Cli) -> None:
    done = cli("db", "upgrade", "--database", "oracle://me:hunter2@host/db")
    assert done.code == 2
    assert "INVALID_DATABASE_URL" in done.err
    assert "hunter2" not in done.err


AT = ("2027-03-14T07:00:00Z", "2027-03-15T07:00:00Z")
ON_A_DATABASE: list[tuple[str, ...]] = [
    ("db", "upgrade"), ("db", "upgrade", "--check"), ("db", "status"), ("db", "zones"), ("backup", "x"), ("restore",),
    ("watch",), ("audit", "--from", AT[0], "--to", AT[1]), ("why", "nightly", AT[0]), ("key", "list"),
    ("tenant", "list"), ("user", "list"), ("import", "crontab", "-", "--dry-run"), ("job", "import", "jobs.ndjson"),
]  # fmt: skip


@pytest.mark.parametrize("command", ON_A_DATABASE)
def test_url_with_an_invalid_port_is_refused_and_not_printed(
    command: tuple[str, ...], cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "jobs.ndjson").write_text('{"topic": "a"}\n')
    done = cli(*command, "--database", "postgresql://me:hunter2/db", stdin="@daily true\n")  # the host is missing
    assert (done.code, "INVALID_DATABASE_URL" in done.err) == (2, True)
    assert "hunter2" not in done.err + done.out


@pytest.mark.parametrize(
    "url",
    ["postgresql://h:99999/x", "postgresql://h:0/x", "postgresql://h/x?host=a:1&host=b:none", "mariadb://h:65536/x"],
)
def test_port_out_of_range_is_refused(url: str, cli: Cli) -> None:
    done = cli("db", "status", "--database", url)
    assert (done.code, "INVALID_DATABASE_URL" in done.err) == (2, True)


@pytest.mark.parametrize("url", ["postgresql://me:hunter2@h:none/x", "postgresql://me:hunter2/db", "nonsense"])
def test_doctor_reports_an_invalid_url(url: str, cli: Cli) -> None:
    done = cli("doctor", "--database", url, "-o", "json")
    found = {check["name"]: check for check in json.loads(done.out)}["database"]
    assert (done.code, found["verdict"], found["code"]) == (1, "fail", "DATABASE_UNREACHABLE")
    assert "postgresql://user@host" in found["fix"]
    assert "hunter2" not in done.out + done.err


@pytest.fixture
def durable_sqlite_url(migrated_file: Path, tmp_path: Path) -> str:
    """A fresh, migrated SQLite file with the usual settings."""
    return f"sqlite:///{shutil.copy(migrated_file, tmp_path / 'timebell.db')}"


@pytest.mark.parametrize(
    "store_url", ["durable_sqlite", "postgres", pytest.param("mariadb", marks=pytest.mark.slow)], indirect=True
)
def test_doctor_reports_no_problem_of_a_healthy_database(
    store_url: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIMEBELL_HTTP_PORT", str(free_port()))
    done = cli("doctor", "--database", store_url, "-o", "json")
    checks = {check["name"]: check for check in json.loads(done.out)}
    assert done.code == 0
    lax = {"durability"} if not store_url.startswith("sqlite") else set()  # test servers may run without fsync
    lax |= {"file", "disk", "files", "role", "connection"}  # depends on the machine that runs the tests
    assert {name for name, check in checks.items() if check["verdict"] != "ok"} <= lax
    engine = {"sqlite", "engine"} if store_url.startswith("sqlite") else {"listen", "nodes"}
    assert (
        set(checks) - lax | {"durability"}
        == {"database", "schema", "durability", "clock", "zone data", "port"} | engine
    )
    assert "Z" in checks["clock"]["detail"]
    assert "answers in" in checks["database"]["detail"]


def test_doctor_reports_problems_with_a_fix(cli: Cli, tmp_path: Path) -> None:
    done = cli("doctor", "--database", UNREACHABLE_URL)
    assert done.code == 1
    assert done.out.startswith("fail  database")
    assert "TIMEBELL_DATABASE_URL" in done.out
    assert "hunter2" not in done.out

    (tmp_path / "empty.db").touch()
    done = cli("doctor", "--database", f"sqlite:///{tmp_path}/empty.db", "-o", "json")
    checks = {check["name"]: check for check in json.loads(done.out)}
    assert (done.code, checks["schema"]["verdict"]) == (1, "fail")
    assert "db upgrade" in checks["schema"]["fix"]

    (tmp_path / "text.db").write_text("this is not a database " * 100)
    done = cli("doctor", "--database", f"sqlite:///{tmp_path}/text.db")
    assert (done.code, "fail  database" in done.out) == (1, True)


def test_doctor_warns_about_a_port_in_use(sqlite_url: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("TIMEBELL_HTTP_PORT", str(listening.getsockname()[1]))
        done = cli("doctor", "--database", sqlite_url)
    assert done.code == 0  # a warning: perhaps it is Timebell
    assert any(line.startswith("warn  port") for line in done.out.splitlines())


def test_version_lists_the_versions(cli: Cli) -> None:
    assert set(json.loads(cli("version", "-o", "json").out)) == {"timebell", "python", "tzdata", "sqlite"}
    assert len(cli("version").out.splitlines()) == 4
    assert cli("--version").out == f"timebell, version {json.loads(cli('version', '-o', 'json').out)['timebell']}\n"
    assert cli("version", "-o", "yaml").out.startswith('timebell: "')
    assert cli("version", "-o", "csv").out.startswith("timebell,python")


def test_unknown_setting_is_refused_by_every_command(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIMEBELL_DATABSE_URL", "x")
    for command in (("version",), ("doctor",), ("next", "* * * * *", "--timezone", "UTC"), ("db", "status")):
        done = cli(*command)
        assert done.code == 2
        assert "Did you mean TIMEBELL_DATABASE_URL?" in done.err


@pytest.mark.parametrize("args", [("frobnicate",), ("next", "--count", "0"), ("db",), ("doctor", "-o", "xml")])
def test_usage_errors_exit_with_2(args: tuple[str, ...], cli: Cli) -> None:
    assert cli(*args).code == 2
