"""`timebell backup` and `restore`: an operator decides what runs again after a restore, and it is audited."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import sqlite3
import subprocess
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.engine.world import QUIET
from tests.servers import Postgres
from timebell import Arrived, Cron, Timebell
from timebell.clock import VirtualClock, system_now
from timebell.errors import Refused
from timebell.model.job import Hold
from timebell.sim.loop import run_virtual

from .conftest import Cli

HOUR = timedelta(hours=1)
NOW = datetime.now(UTC).replace(second=0, microsecond=0)
CREATED, BACKED_UP, LOST = NOW - 10 * HOUR, NOW - 6 * HOUR, NOW - 3 * HOUR


def create_app(url: str, clock: VirtualClock | None, ran: Counter[str]) -> Timebell:
    app = Timebell(url, timezone="UTC", **({} if clock is None else {"clock": clock}))

    @app.on("*", handles=True)
    async def count_run(event: Arrived) -> None:
        ran[event.occurrence_key] += 1

    return app


def run_engine(url: str, start: datetime, end: datetime, ran: Counter[str], *, make: bool = False) -> None:
    """Run an engine on virtual time from `start` to `end`."""
    clock = VirtualClock(start + timedelta(seconds=1))

    async def body() -> None:
        app = create_app(url, clock, ran)
        if make:
            for name, options in (("latest", {}), ("all", {"catch_up": "all"}), ("skip", {"catch_up": "skip"})):
                await app.schedule_repeat("report", Cron(f"{(NOW.minute + 30) % 60} * * * *"), name=name, **options)
            for hours in (1, 5, 8, 20):  # before the backup, after it, while all is down, after the restore
                await app.schedule_at("mail", CREATED + hours * HOUR)
        async with app.running(**QUIET):
            await asyncio.sleep((end - clock.now()).total_seconds())
        await app.close()

    run_virtual(body())


def test_jobs_run_since_the_backup_are_held_and_accounted_for(sqlite_url: str, cli: Cli, tmp_path: Path) -> None:
    ran: Counter[str] = Counter()
    run_engine(sqlite_url, CREATED, BACKED_UP, ran, make=True)
    backup_file = tmp_path / "backup.db"
    assert cli("backup", backup_file, "--database", sqlite_url).code == 0
    before = Counter(ran)
    run_engine(sqlite_url, BACKED_UP, LOST, ran)
    since = ran - before
    assert len(since) == 3 * 3 + 1  # three runs of each schedule and one one-shot

    done = cli("restore", backup_file, "--yes", "--database", sqlite_url, "-o", "json")
    assert (done.code, done.err) == (0, "")
    summary = json.loads(done.out)
    # Occurrences from the backup to now, at half past: `all` holds a job for each, `latest` one job, `skip` none.
    late = (datetime.now(UTC) - BACKED_UP + HOUR / 2) // HOUR
    assert (summary["due"], summary["occurrences"], summary["schedules"]) == (2, 1 + late, 3)
    assert Path(summary["before"]).exists()

    async def start() -> list[tuple[str | None, int]]:
        app = create_app(sqlite_url, None, ran)
        async with app.running() as service:
            await service.wait_until_idle()
            backlogs = [(one.schedule, one.jobs) for one in await app.schedules.backlogs()]
            assert await app.schedules.release(discard=True) == sum(jobs for _, jobs in backlogs)
            await service.wait_until_idle()
        await app.close()
        return backlogs

    everything = Counter(ran)
    backlogs = asyncio.run(start())
    assert ran == everything, "a job ran without release, or twice"
    assert dict(backlogs) == {None: 2, "latest": 1, "all": late}
    audited = cli(
        "audit",
        "--from",
        _format_utc(CREATED),
        "--to",
        _format_utc(system_now() - timedelta(minutes=2)),
        "--database",
        sqlite_url,
    )
    assert audited.code == 0, audited.out  # each occurrence has exactly one row: ran before, skipped, or discarded


def test_released_jobs_run_with_the_same_keys(sqlite_url: str, cli: Cli, tmp_path: Path) -> None:
    ran: Counter[str] = Counter()
    run_engine(sqlite_url, CREATED, BACKED_UP, ran, make=True)
    assert cli("backup", tmp_path / "backup.db", "--database", sqlite_url).code == 0
    run_engine(sqlite_url, BACKED_UP, LOST, ran)
    assert cli("restore", tmp_path / "backup.db", "-y", "--database", sqlite_url).code == 0
    lost = Counter(ran)

    async def start() -> None:
        app = create_app(sqlite_url, None, ran)
        async with app.running():
            assert await app.schedules.release() > 0
            async with asyncio.timeout(60):
                while [job.run_at for job in await app.list(status=["pending", "running"])] != [CREATED + 20 * HOUR]:
                    await asyncio.sleep(0.05)
        await app.close()

    asyncio.run(start())
    again = {key for key, count in ran.items() if count == 2}
    assert again <= set(lost), "only keys that the receiver has already seen may repeat"
    assert len(again) == 3 + 1  # three of `all` and the one-shot; the newest run of `latest` is after the outage
    assert max(ran.values()) == 2


@pytest.fixture
def dump_tools(postgres: Postgres, postgres_url: str, tmp_path: Path) -> object:
    """Functions that dump and restore the database: with pg_dump if installed, else as a copy of the database."""
    tools = postgres._binaries() if hasattr(postgres, "folder") else Path("/usr/bin")
    has = (tools / "pg_dump").exists()
    name = urlsplit(postgres_url).path[1:]

    def dump() -> None:
        if has:
            subprocess.run([tools / "pg_dump", f"--dbname={postgres_url}", "-Fc", f"--file={tmp_path}/d"], check=True)
        else:
            postgres._execute(f'CREATE DATABASE "{name}_kept" TEMPLATE "{name}"')

    def restore_dump() -> None:
        if has:
            command = [tools / "pg_restore", "--clean", "--if-exists", f"--dbname={postgres_url}", f"{tmp_path}/d"]
            subprocess.run(command, check=True)
        else:
            postgres.drop_database(postgres_url)
            postgres._execute(f'CREATE DATABASE "{name}" TEMPLATE "{name}_kept"')
            postgres.drop_database(postgres.named(f"{name}_kept"))

    return dump, restore_dump


def test_postgres_restore_prints_the_command_and_holds_restored_jobs(
    postgres_url: str, cli: Cli, dump_tools: tuple[object, object]
) -> None:
    dump, restore_dump = dump_tools
    at = ("--database", postgres_url)
    done = cli("backup", "dump", *at)
    assert (done.code, "pg_dump --dbname=postgresql://" in done.err) == (4, True)
    done = cli("backup", "dump", "--database", "postgresql://me:hunter2@127.0.0.1:1/db")
    assert ("hunter2" in done.err, "PGPASSWORD=..." in done.err) == (False, True)
    done = cli("restore", "dump", *at)
    assert (done.code, "pg_restore" in done.err) == (4, True)

    ran: Counter[str] = Counter()

    async def first() -> None:
        app = create_app(postgres_url, None, ran)
        await app.schedule_at("mail", system_now() + timedelta(seconds=1))
        await asyncio.to_thread(dump)
        async with app.running(heartbeat=0.5) as service:
            async with asyncio.timeout(60):
                while not ran:
                    await asyncio.sleep(0.05)
            await service.wait_until_idle()
        await app.close()

    asyncio.run(first())
    restore_dump()
    assert cli("restore", *at).code == 0

    async def again() -> None:
        app = create_app(postgres_url, None, ran)
        async with app.running() as service:
            await service.wait_until_idle()
            (job,) = (await app.list()).items
            assert job.hold is Hold.BACKLOG
            with pytest.raises(Exception, match="ran within the last"):
                await asyncio.to_thread(_restore_again, postgres_url)
        await app.close()

    asyncio.run(again())
    assert sum(ran.values()) == 1


@pytest.mark.parametrize(("scheme", "dump", "restore_dump", "variable"), [
    ("postgresql", "pg_dump --dbname=postgresql://me@127.0.0.1:1/db --format=custom --file=dump", "pg_restore --dbname="
     "postgresql://me@127.0.0.1:1/db --clean --if-exists dump", "PGPASSWORD"),
    ("mariadb", "mariadb-dump --single-transaction --host=127.0.0.1 --port=1 --user=me db > dump",
     "mariadb --host=127.0.0.1 --port=1 --user=me db < dump", "MYSQL_PWD"),
])  # fmt: skip
def test_server_databases_are_backed_up_with_their_own_tools(
    scheme: str, dump: str, restore_dump: str, variable: str
) -> None:
    from timebell.cli.backup import backup, restore

    url = f"{scheme}://me:hunter2@127.0.0.1:1/db"
    with pytest.raises(Refused) as refused:
        backup(Path("dump"), url, None)
    assert (refused.value.code, refused.value.fix) == ("USE_DATABASE_BACKUP_TOOLS", f"Run: {variable}=... {dump}")
    with pytest.raises(Refused) as refused:
        restore(Path("dump"), url, None, yes=True)
    assert refused.value.fix == f"Run: {variable}=... {restore_dump} and then: timebell restore"


def _restore_again(url: str) -> None:
    from timebell.cli.backup import restore

    restore(None, url, None, yes=True)


def test_backup_is_complete_or_absent(sqlite_url: str, cli: Cli, tmp_path: Path) -> None:
    at = ("--database", sqlite_url)
    backup_file = tmp_path / "backup.db"
    assert json.loads(cli("backup", backup_file, *at, "-o", "json").out)["bytes"] == backup_file.stat().st_size
    assert backup_file.stat().st_mode & 0o077 == 0
    done = cli("backup", backup_file, *at)
    assert (done.code, "BACKUP_EXISTS" in done.err) == (5, True)
    assert cli("backup", tmp_path / "none" / "x", *at).code == 2
    assert cli("backup", tmp_path / "x", "--database", f"sqlite:///{tmp_path}/none.db").code == 3

    shutil.copy(backup_file, tmp_path / "broken.db")
    with (tmp_path / "broken.db").open("r+b") as file:
        file.seek(4096)
        file.write(b"x" * 40_000)
    (tmp_path / "text.db").write_text("no database at all " * 1000)
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE t (x)")
    for name in ("broken.db", "text.db", "other.db"):
        done = cli("restore", tmp_path / name, "-y", *at)
        assert (done.code, "INVALID_BACKUP" in done.err) == (2, True), name
    with sqlite3.connect(backup_file) as newer:
        newer.execute("UPDATE timebell_version SET version_num = '9999'")
    assert "BACKUP_NEWER" in cli("restore", backup_file, "-y", *at).err
    assert "BACKUP_NOT_FOUND" in cli("restore", tmp_path / "gone", "-y", *at).err
    assert cli("restore", backup_file, *at).code == 2
    assert not list(tmp_path.glob("*.unfinished")) + list(tmp_path.glob(".*.unfinished"))


def test_backup_can_replace_a_corrupt_database(sqlite_url: str, cli: Cli, tmp_path: Path) -> None:
    at, backup_file = ("--database", sqlite_url), tmp_path / "backup.db"
    assert cli("backup", backup_file, *at).code == 0
    database = Path(sqlite_url.removeprefix("sqlite:///"))
    broken = b"no database any more " * 1000
    database.write_bytes(broken)
    summary = json.loads(cli("restore", backup_file, "-y", *at, "-o", "json").out)
    assert Path(summary["before"]).read_bytes() == broken
    assert cli("db", "upgrade", "--check", *at).code == 0


@pytest.mark.parametrize("why", [errno.EPERM, errno.ENOTSUP])
def test_restore_keeps_a_copy_where_hard_links_are_unsupported(
    why: int, sqlite_url: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, backup_file = ("--database", sqlite_url), tmp_path / "backup.db"
    assert cli("backup", backup_file, *at).code == 0
    database = Path(sqlite_url.removeprefix("sqlite:///"))
    database.write_bytes(b"what was there " * 1000)

    def refuse(*_: object) -> None:
        raise OSError(why, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    summary = json.loads(cli("restore", backup_file, "-y", *at, "-o", "json").out)
    assert Path(summary["before"]).read_bytes() == b"what was there " * 1000
    assert cli("db", "upgrade", "--check", *at).code == 0
    assert not list(database.parent.glob(".*.unfinished"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(shutil, "copyfile", full)
    before = database.read_bytes()
    refused = cli("restore", backup_file, "-y", *at)
    assert (refused.code, "DATABASE_UNREACHABLE" in refused.err) == (6, True)
    assert database.read_bytes() == before
    assert not [one for one in database.parent.iterdir() if ".unfinished" in one.name or ".restored-" in one.name]


def test_backup_during_writes_is_consistent(sqlite_url: str, cli: Cli, tmp_path: Path) -> None:
    async def main() -> list[int]:
        app = Timebell(sqlite_url, timezone="UTC")
        sizes = []
        async with app.running():
            for number in range(3):
                writing = asyncio.create_task(app.schedule_many([_spec()] * 200))
                await asyncio.to_thread(_backup, tmp_path / f"{number}.db", sqlite_url)
                await writing
                with sqlite3.connect(tmp_path / f"{number}.db") as copy:
                    sizes.append(copy.execute("SELECT count(*) FROM timebell_jobs").fetchone()[0])
            done = await asyncio.to_thread(_in_use, tmp_path / "0.db", sqlite_url)
        await app.close()
        assert done == "SQLITE_IN_USE"
        return sizes

    sizes = asyncio.run(main())
    assert all(size % 200 == 0 for size in sizes), "each transaction is complete or absent"
    assert sizes[-1] >= 400


def _spec() -> object:
    from timebell import JobSpec

    return JobSpec(topic="later", run_at=system_now() + HOUR, timezone="UTC")


def _backup(file: Path, url: str) -> None:
    from timebell.cli.backup import backup

    backup(file, url, None)


def _in_use(file: Path, url: str) -> str:
    from timebell.cli.backup import restore
    from timebell.errors import TimebellError

    try:
        restore(file, url, None, yes=True)
    except TimebellError as refused:
        return refused.code
    return "restored"


def _format_utc(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
