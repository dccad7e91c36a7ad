"""`timebell job import`."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from timebell import Timebell, errors
from timebell.cli import job_import
from timebell.client import job_lines
from timebell.client.jobs import Jobs
from timebell.clock import system_now
from timebell.model.job import Job

from .conftest import Cli

LATER = "2030-01-01T09:00:00Z"


def write(path: Path, *lines: Any) -> None:
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )


def stored(url: str) -> list[Job]:
    async def read() -> list[Job]:
        app = Timebell(url)
        try:
            return list((await app.list(limit=500)).items)
        finally:
            await app.close()

    return asyncio.run(read())


def summary(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


def test_all_fields_are_stored(cli: Cli, tmp_path: Path, sqlite_url: str) -> None:
    write(tmp_path / "jobs.ndjson", {
        "topic": "tea.ready", "runAt": "2030-01-01T09:00:00", "timezone": "Asia/Seoul", "payload": {"n": [1, None]},
        "metadata": {"ownerId": "o", "tenantId": "t", "correlationId": "c", "clientRequestId": "r", "own": 1},
        "key": "k", "queue": "q", "priority": 3,
        "retry": {"attempts": 2, "backoff": {"type": "fixed", "delay": 1, "max": 9}},
        "timeoutSeconds": 7, "expiresAfterSeconds": 60, "target": None,
    })  # fmt: skip
    done = cli("job", "import", "jobs.ndjson", "--database", sqlite_url, "-o", "json")
    assert done.code == 0
    assert summary(done.out)["created"] == 1
    (job,) = stored(sqlite_url)
    assert job.run_at == datetime(2030, 1, 1, tzinfo=UTC)
    assert (job.timezone, job.payload, job.owner_id, job.tenant_id) == ("Asia/Seoul", {"n": [1, None]}, "o", "t")
    assert job.metadata == {"owner_id": "o", "correlation_id": "c", "client_request_id": "r", "own": 1}
    assert (job.key, job.queue, job.priority, job.timeout) == ("k", "q", 3, 7)
    assert job.retry is not None
    assert (job.retry["attempts"], job.retry["backoff"], job.retry["delay"], job.retry["max_delay"]) == (
        2,
        "fixed",
        1,
        9,
    )
    assert job.expires_at == job.run_at + timedelta(seconds=60)
    assert job.local_time == "2030-01-01T09:00:00"


def test_invalid_lines_are_written_to_the_rejected_file_and_valid_ones_imported(
    cli: Cli, tmp_path: Path, sqlite_url: str
) -> None:
    good = {"topic": "a", "runAt": LATER}
    gap = {"topic": "a", "runAt": "2039-03-13T02:30", "timezone": "America/New_York"}
    bad: list[tuple[Any, str]] = [
        (b"{", "INVALID_JSON"),
        (b"\xff\xfe", "INVALID_JSON"),
        ([1], "LINE_NOT_JSON"),
        (b'"' + b"x" * 2_000_000 + b'"', "LINE_TOO_LONG"),
        ({"runAt": LATER}, "TOPIC_MISSING"),
        ({**good, "topic": "no spaces"}, "INVALID_TOPIC"),
        ({**good, "runat": 1}, "UNKNOWN_FIELD"),
        ({**good, "runAt": "soon"}, "INVALID_RUN_AT"),
        ({**good, "runAt": 5}, "INVALID_RUN_AT"),
        ({**good, "runAt": "2030-02-30T00:00:00Z"}, "INVALID_RUN_AT"),
        ({**good, "runAt": "2030-01-01T00:00:00"}, "RUN_AT_WITHOUT_TIMEZONE"),
        ({**good, "runAt": "2030-01-01T00:00:00+09:00"}, "TIMEZONE_MISSING"),
        ({**good, "runAt": "2020-01-01T00:00:00Z"}, "SCHEDULE_IN_THE_PAST"),
        ({**gap, "onGap": "error"}, "RUN_AT_IN_GAP"),
        ({**gap, "runAt": "2039-11-06T01:30", "onFold": "error"}, "RUN_AT_AMBIGUOUS"),
        ({**gap, "onGap": "end"}, "INVALID_ON_GAP"),
        ({**gap, "onFold": 1}, "INVALID_ON_FOLD"),
        ({**good, "timezone": "KST"}, "INVALID_TIMEZONE"),
        ({**good, "metadata": 5}, "INVALID_METADATA"),
        ({**good, "retry": {"tries": 5}}, "INVALID_RETRY"),
        ({**good, "retry": {"attempts": 0}}, "INVALID_RETRY"),
        ({**good, "retry": {"attempts": 2}, "maxRetries": 1}, "INVALID_RETRY"),
        ({**good, "payload": "x" * 70_000}, "PAYLOAD_TOO_LARGE"),
        ({**good, "priority": "high"}, "INVALID_PRIORITY"),
        ({**good, "timeoutSeconds": -1}, "INVALID_DURATION"),
        ({**good, "target": {"kind": "carrier-pigeon"}}, "UNKNOWN_TARGET_KIND"),
        ({**good, "target": {"kind": "command", "argv": ["/bin/true"]}}, "COMMAND_TARGET_OFF"),
    ]
    lines = [line for entry, _ in bad for line in (entry, good)]
    write(tmp_path / "jobs.ndjson", b"", *lines)
    done = cli("job", "import", "jobs.ndjson", "--database", sqlite_url, "-o", "json")
    assert done.code == 1
    counts = summary(done.out)
    assert (counts["created"], counts["existing"], counts["refused"]) == (1, len(bad) - 1, len(bad))
    rejected = [json.loads(line) for line in (tmp_path / "jobs.rejected.ndjson").read_text().splitlines()]
    assert sorted((each["line"], each["code"]) for each in rejected) == [
        (number, code) for number, (_, code) in zip(range(2, 1000, 2), bad, strict=False)
    ]
    assert all(each["message"] for each in rejected)
    assert [each["job"] for each in rejected if each["code"] == "TOPIC_MISSING"] == [{"runAt": LATER}]
    assert len(stored(sqlite_url)) == 1


@pytest.mark.parametrize(
    ("past", "created", "skipped", "refused"), [("refuse", 1, 0, 2), ("skip", 1, 2, 0), ("now", 3, 0, 0)]
)
def test_past_option_refuses_skips_or_runs_past_jobs(
    past: str, created: int, skipped: int, refused: int, cli: Cli, tmp_path: Path, sqlite_url: str
) -> None:
    old = [{"topic": "a", "runAt": f"2020-01-0{day}T00:00:00Z"} for day in (1, 2)]
    write(tmp_path / "jobs.ndjson", *old, {"topic": "a", "runAt": LATER})
    done = cli("job", "import", "jobs.ndjson", "--past", past, "--database", sqlite_url, "-o", "json")
    counts = summary(done.out)
    assert (counts["created"], counts["skipped"], counts["refused"]) == (created, skipped, refused)
    assert done.code == (1 if refused else 0)


def test_import_is_idempotent(cli: Cli, tmp_path: Path, store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_import, "BATCH_SIZE", 7)
    lines = [{"topic": "a", "runAt": LATER, "payload": number} for number in range(30)]
    lines += [{"topic": "b", "runAt": LATER, "key": f"k{number}"} for number in range(5)]
    lines += [{"topic": "c", "runAt": LATER, "metadata": {"clientRequestId": f"r{number}"}} for number in range(5)]
    write(tmp_path / "jobs.ndjson", *lines[:20])
    assert summary(cli("job", "import", "jobs.ndjson", "--database", store_url, "-o", "json").out)["created"] == 20
    write(tmp_path / "jobs.ndjson", *lines)
    counts = summary(cli("job", "import", "jobs.ndjson", "--database", store_url, "-o", "json").out)
    assert (counts["created"], counts["existing"]) == (20, 20)
    counts = summary(cli("job", "import", "jobs.ndjson", "--database", store_url, "-o", "json").out)
    assert (counts["created"], counts["existing"]) == (0, 40)
    assert len(stored(store_url)) == 40


def test_interrupted_import_reports_its_progress(
    cli: Cli, tmp_path: Path, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_import, "BATCH_SIZE", 2)
    write(tmp_path / "jobs.ndjson", *({"topic": "a", "runAt": LATER, "payload": number} for number in range(6)))
    insert_drafts = Jobs.insert_drafts
    calls = []

    async def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise errors.StoreUnreachable("The database x does not answer.")
        return await insert_drafts(self, *args, **kwargs)

    monkeypatch.setattr("timebell.client.jobs.Jobs.insert_drafts", failing)
    done = cli("job", "import", "jobs.ndjson", "--database", sqlite_url)
    assert done.code == 6
    assert "Stopped. 4 jobs created" in done.err
    assert "DATABASE_UNREACHABLE" in done.err


def test_summary_goes_to_stderr_unless_a_format_is_requested(cli: Cli, tmp_path: Path, sqlite_url: str) -> None:
    (tmp_path / "jobs.ndjson").write_bytes(b'\xef\xbb\xbf{"topic":"a","timezone":"UTC"}\r\n\r\n')
    done = cli("job", "import", "jobs.ndjson", "--database", sqlite_url)
    assert (done.code, done.out) == (0, "")
    assert "1 jobs created" in done.err
    assert stored(sqlite_url)[0].run_at <= system_now()


def test_rejected_file_of_an_earlier_import_is_removed(cli: Cli, tmp_path: Path, sqlite_url: str) -> None:
    write(tmp_path / "jobs.ndjson", b"nonsense")
    assert cli("job", "import", "jobs.ndjson", "--database", sqlite_url).code == 1
    assert (tmp_path / "jobs.rejected.ndjson").exists()
    write(tmp_path / "jobs.ndjson", {"topic": "a", "runAt": LATER})
    assert cli("job", "import", "jobs.ndjson", "--database", sqlite_url).code == 0
    assert not (tmp_path / "jobs.rejected.ndjson").exists()


def test_invalid_usage_is_refused(cli: Cli, tmp_path: Path, sqlite_url: str) -> None:
    assert cli("job", "import", "none.ndjson", "--database", sqlite_url).code == 2
    write(tmp_path / "jobs.ndjson")
    assert cli("job", "import", "jobs.ndjson", "--past", "sometimes", "--database", sqlite_url).code == 2
    assert cli("job", "import", "jobs.ndjson", "--database", sqlite_url).code == 0  # an empty file is fine


def test_derived_request_id_depends_only_on_the_text() -> None:
    one, two = (job_lines.parse_line(b'{"topic":"a","payload":%d}' % number) for number in (1, 2))
    assert one.client_request_id != two.client_request_id
    assert job_lines.parse_line(b'{"topic":"a","payload":1}').client_request_id == one.client_request_id
