"""Commands that call a server: one real server is started for all tests."""

from __future__ import annotations

import gzip
import importlib
import json
import re
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml
from standardwebhooks.webhooks import Webhook

from tests.servers import free_port
from timebell.cli.remote import ServerClient
from timebell.errors import ServerUnreachable

from .conftest import Cli
from .process import Process

APP = """
from timebell import Fail, Timebell
app = Timebell()

@app.on("mail.send")
async def send(event):
    return {"sent": event.payload}

@app.on("mail.fail")
async def fail(event):
    raise Fail("mailbox is full")

@app.schedule("from-code", cron="0 0 1 1 *", timezone="UTC", topic="mail.send")
async def nothing(event): ...
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running `timebell dev`."""
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    (folder / "app.py").write_text(APP)
    process = Process(folder, ["dev", "app.py", "--port", str(port), "--no-reload"],
                      {"TIMEBELL_WEBHOOK_ALLOW_PRIVATE": "true", "TIMEBELL_COMMAND_ENABLED": "true"})  # fmt: skip
    process.wait_for("Ready in", err=True)
    yield f"http://127.0.0.1:{port}"
    process.kill()


@pytest.fixture
def remote(cli: Cli, server: str, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run `timebell ...` against the server."""
    monkeypatch.setenv("TIMEBELL_URL", server)
    return cli


def as_json(done: Any) -> Any:
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_backlogs_are_listed_released_and_discarded(remote: Cli) -> None:
    output = remote("release")
    assert (output.code, output.err.strip()) == (0, "None.")
    assert as_json(remote("release", "-o", "json")) == []
    for options in (["--all"], ["--all", "--discard"]):
        assert as_json(remote("release", *options, "--yes", "-o", "json")) == {"jobs": 0}
    assert remote("release", "--discard").code == remote("release", "nightly", "--all").code == 2
    assert remote("release", "missing").code == 3


def test_schedules_that_were_removed_from_the_code_are_pruned(remote: Cli) -> None:
    assert "No schedule was removed" in remote("schedule", "prune", "--yes").err
    for name in ("kept", "gone"):
        remote("schedule", "create", name, "--topic", "report.build", "--cron", "0 2 * * *", "--tz", "UTC")
        remote("schedule", "pause", name, "-r", "removed from code" if name == "gone" else "lunch")
    assert "Deleted 1." in remote("schedule", "prune", "--yes").err
    names = {each["name"] for each in as_json(remote("schedule", "list", "-o", "json"))}
    assert "kept" in names and "gone" not in names


def test_job_wait_ends_with_the_job(remote: Cli) -> None:
    sent = as_json(remote("job", "create", "mail.send", "-o", "json"))
    assert as_json(remote("job", "wait", sent["id"], "-o", "json"))["status"] == "completed"
    later = as_json(remote("job", "create", "mail.send", "--at", "2040-01-01T00:00:00Z", "--tz", "UTC", "-o", "json"))
    stopped = remote("job", "wait", later["id"], "--timeout", "0")
    assert (stopped.code, "Still pending after 0 s." in stopped.err) == (1, True)
    assert remote("job", "wait", "01900000-0000-7000-8000-000000000000").code == 3


def test_list_and_show_agree_that_a_schedule_fails(remote: Cli) -> None:
    remote("schedule", "create", "broken", "--topic", "mail.fail", "--cron", "0 0 1 1 *", "--tz", "UTC")
    job = as_json(remote("schedule", "trigger", "broken", "-o", "json"))
    assert remote("job", "wait", job["id"]).code == 1
    line = next(line for line in remote("schedule", "list").out.splitlines() if line.startswith("broken"))
    assert re.search(r"x +failing$", line)
    assert remote("schedule", "show", "broken").out.startswith("broken  failing")
    assert remote("schedule", "delete", "broken", "--yes").code == 0


def test_schedule_is_created_shown_edited_managed_and_deleted(remote: Cli) -> None:
    created = as_json(remote(
        "schedule", "create", "nightly", "--topic", "report.build", "--cron", "0 2 * * *", "--tz", "America/New_York",
        "--payload", '{"a": 1}', "--retries", 5, "--label", "team=billing", "-o", "json",
    ))  # fmt: skip
    assert (created["maxRetries"], created["labels"], created["payload"]) == (5, {"team": "billing"}, {"a": 1})
    line = next(line for line in remote("schedule", "list").out.splitlines() if line.startswith("nightly"))
    assert re.search(r"nightly +At 02:00 +America/New_York +in .+ E[SD]T +unhandled", line)
    output = remote("schedule", "show", "nightly").out
    assert "report.build" in output
    assert output.count("T02:00:00-0") == 5
    assert as_json(remote("schedule", "edit", "nightly", "--cron", "0 3 * * *", "-o", "json"))["revision"] == 2
    stale = remote("schedule", "edit", "nightly", "--priority", 1, "--revision", 1)
    assert stale.code == 5
    assert "Last changed by local" in stale.err
    assert "REVISION_STALE" in stale.err
    assert (
        as_json(remote("schedule", "pause", "nightly", "-r", "month end", "-o", "json"))["pauseReason"] == "month end"
    )
    assert "paused" in remote("schedule", "list", "--paused").out
    assert "  next, once resumed\n" in remote("schedule", "show", "nightly").out
    assert as_json(remote("schedule", "resume", "nightly", "-o", "json"))["enabled"] is True
    skipped = as_json(remote("schedule", "skip-next", "nightly", "-o", "json"))
    assert len(skipped["overrides"]) == 1
    assert as_json(remote("schedule", "trigger", "nightly", "-o", "json"))["kind"] == "manual"
    runs = as_json(remote("schedule", "history", "nightly", "-o", "json"))
    assert [run["kind"] for run in runs] == ["manual"]
    revisions = remote("schedule", "history", "nightly", "--revisions").out.splitlines()
    assert [line.split()[0] for line in revisions] == ["REVISION", "3", "2", "1"]
    assert as_json(remote("schedule", "revert", "nightly", 1, "-o", "json"))["cronExpression"] == "0 2 * * *"
    unconfirmed = remote("schedule", "delete", "nightly")
    assert (unconfirmed.code, "--yes" in unconfirmed.err) == (2, True)
    assert remote("schedule", "delete", "nightly", "--yes").code == 0
    gone = remote("schedule", "show", "nightly")
    assert (gone.code, "SCHEDULE_NOT_FOUND" in gone.err) == (3, True)


def test_backfill_dry_run_prints_the_plan(remote: Cli) -> None:
    remote("schedule", "create", "daily", "--topic", "t.t", "--cron", "30 2 * * *", "--tz", "Europe/Paris")
    span = ("--from", "2026-11-01", "--to", "2026-11-04")
    planned = remote("schedule", "backfill", "daily", *span, "--dry-run")
    assert "Would fire 3 times (01 Nov 02:30 to 03 Nov 02:30 CET), one after another." in planned.err
    assert remote("schedule", "history", "daily", "-o", "json").out.strip() == "[]"
    assert "3 jobs created." in remote("schedule", "backfill", "daily", *span, "--yes").err
    again = remote("schedule", "backfill", "daily", *span, "--yes")
    assert "No occurrence to run in that range. 3 have already run and are not repeated." in again.err


def test_files_are_applied_compared_and_pruned(remote: Cli, tmp_path: Path) -> None:
    remote("schedule", "create", "a", "--topic", "t.t", "--every", "PT15M", "--tz", "UTC", "--payload", '{"x": [1, 2]}')
    exported = remote("export").out
    bodies = {body["name"]: body for body in yaml.safe_load_all(exported)}
    assert bodies["a"]["interval"]["everyMs"] == 900_000
    assert "from-code" not in bodies
    folder = tmp_path / "schedules"
    folder.mkdir()
    (folder / "all.yaml").write_text(exported)
    same = remote("apply", "-f", folder, "--diff")
    assert (same.code, same.out) == (0, ""), same.out
    changed = exported.replace("900000", "60000") + "\n---\nname: b\ncronExpression: '0 5 * * *'\ntimezone: UTC\n"
    (folder / "all.yaml").write_text(changed + "topic: on\nstartAt: 2027-01-01T00:00:00Z\n")
    diff = remote("apply", "-f", folder, "--diff")
    assert diff.code == 7
    assert "~ a\n    interval: " in diff.out
    assert "+ b  0 5 * * *  UTC" in diff.out
    assert "1 to change, 1 to create, 0 to delete. Nothing changed (--diff)." in diff.err
    assert remote("apply", "-f", folder).code == 0
    assert remote("apply", "-f", folder, "--diff").code == 0
    created = as_json(remote("schedule", "show", "b", "-o", "json"))
    assert (created["topic"], created["startAt"]) == ("on", "2027-01-01T00:00:00Z")
    (folder / "all.yaml").write_text("name: b\ncronExpression: '0 5 * * *'\ntimezone: UTC\ntopic: on\n")
    refused = remote("apply", "-f", folder, "--prune")
    assert (refused.code, "CONFIRMATION_MISSING" in refused.err) == (2, True)
    assert remote("apply", "-f", folder, "--prune", "--yes").code == 0
    names = {one["name"] for one in as_json(remote("schedule", "list", "-o", "json"))}
    assert names == {"b", "from-code"}
    (folder / "all.yaml").write_text("name: c\ncronExpression: '99 * * * *'\ntimezone: UTC\ntopic: t\n---\nname: d\n")
    wrong = remote("apply", "-f", folder)
    assert (wrong.code, "c: 99 in minute is out of range" in wrong.err) == (2, True)
    assert {one["name"] for one in as_json(remote("schedule", "list", "-o", "json"))} == names, "nothing was written"


def test_apply_leaves_a_schedule_that_was_edited_meanwhile(
    remote: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, others = tmp_path / "all.yaml", remote("export").out
    edited = "name: edited\ncronExpression: '0 5 * * *'\ntimezone: UTC\ntopic: t\n"
    file.write_text(edited)
    assert remote("apply", "-f", file).code == 0
    id_ = as_json(remote("schedule", "show", "edited", "-o", "json"))["id"]
    request, priorities = ServerClient.request, count(1)

    def edit_before(self: ServerClient, method: str, path: str, *args: Any, **more: Any) -> Any:
        if method in ("PUT", "DELETE"):
            request(self, "PATCH", f"/schedules/{id_}", {"priority": next(priorities)}, if_match="*")
        return request(self, method, path, *args, **more)

    monkeypatch.setattr(ServerClient, "request", edit_before)
    file.write_text(edited.replace("0 5", "0 6"))
    changed = remote("apply", "-f", file)
    assert (changed.code, "REVISION_STALE" in changed.err) == (5, True), changed.err
    file.write_text(f"{others}\n---\n{edited.replace('edited', 'created')}")
    deleted = remote("apply", "-f", file, "--prune", "--yes")
    assert (deleted.code, "REVISION_STALE" in deleted.err) == (5, True), deleted.err
    assert as_json(remote("schedule", "show", "edited", "-o", "json"))["cronExpression"] == "0 5 * * *"


def test_upcoming_lists_each_schedule_with_its_number_of_runs(remote: Cli) -> None:
    for name, cron in (("hourly-report", "0 * * * *"), ("night-report", "0 3 * * *")):
        assert remote("schedule", "create", name, "--cron", cron, "--timezone", "UTC", "--topic", "t").code == 0
    listed = {row["name"]: row["runs"] for row in as_json(remote("upcoming", "-o", "json"))}
    assert (listed["hourly-report"], listed["night-report"]) == (24, 1)
    assert "hourly-report" in remote("upcoming", "--hours", "1").out


def test_why_explains_jobs_and_local_times_over_http(remote: Cli) -> None:
    created = as_json(remote("job", "create", "order.paid", "--at", "2040-01-01T00:00:00Z", "-o", "json"))
    explained = remote("why", created["id"])
    assert "Created" in explained.out
    assert remote("why", "no-id").code == 2
    schedule = ("--cron", "0 9 * * *", "--timezone", "Asia/Seoul", "--topic", "t")
    assert remote("schedule", "create", "seoul-report", *schedule).code == 0
    local, utc = (remote("why", "seoul-report", at) for at in ("2039-01-01T09:00", "2039-01-01T00:00:00Z"))
    assert (local.code, local.out) == (0, utc.out)


def test_calendar_lists_fires_of_all_schedules_and_exports_icalendar(remote: Cli) -> None:
    remote("schedule", "create", "hourly", "--topic", "t.t", "--cron", "0 * * * *", "--tz", "Asia/Seoul")
    fires = as_json(remote("calendar", "--days", 1, "--topic", "t.t", "-o", "json"))
    assert len([fire for fire in fires if fire["schedule"] == "hourly"]) == 24
    assert "hourly  Asia/Seoul" in remote("calendar", "--days", 1, "--topic", "t.t").out
    ics = remote("calendar", "--days", 1, "--topic", "t.t", "--ics").out
    assert ics.startswith("BEGIN:VCALENDAR\r\nVERSION:2.0\r\n")
    assert ics.count("BEGIN:VEVENT") == len(fires)
    assert all(len(line.encode()) <= 75 for line in ics.split("\r\n"))


def test_job_request_is_previewed_recorded_and_redelivered(remote: Cli) -> None:
    target = '{"kind": "command", "argv": ["/bin/cat"], "template": {"to": "{{payload.to}}"}}'
    given = ("job", "create", "mail.post", "--tz", "UTC", "--payload", '{"to": "ana"}', "--target", target)
    output = remote(*given, "--dry-run")
    assert '["/bin/cat"]\n{"to":"ana"}\n' in output.out
    assert "Nothing created" in output.err
    refused = remote(*given[:-3], "{}", "--target", target, "--dry-run")
    assert (refused.code, "INVALID_BODY" in refused.err) == (2, True)
    id_ = as_json(remote(*given, "-o", "json"))["id"]

    def ended(attempts: int) -> Any:
        for _ in range(1000):
            job = as_json(remote("job", "show", id_, "-o", "json"))
            if job["status"] == "completed" and len(job["attempts"]) == attempts:
                return job
        raise AssertionError(job)

    assert ended(1)["result"]["stdout"] == '{"to":"ana"}\n'
    assert as_json(remote("job", "redeliver", id_, "-o", "json"))["status"] in ("pending", "running", "completed")
    assert [one["messageId"] for one in ended(2)["attempts"]] == [id_, f"{id_}.r1"]
    assert re.search(
        rf"sent +\S+  attempt 2 to command in [0-9.]+ ms, message {id_}\.r1", remote("job", "show", id_).out
    )


def test_errors_set_their_exit_codes(remote: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = remote("schedule", "create", "x", "--topic", "t", "--cron", "61 * * * *", "--tz", "UTC")
    assert (bad.code, "INVALID_CRON" in bad.err, bad.out) == (2, True, "")
    misspelt = remote("schedule", "create", "x", "--topic", "t", "--cron", "0 * * * *", "--tz", "Europe/Pariss")
    assert (misspelt.code, "Invalid timezone: Europe/Pariss. Use IANA format" in misspelt.err) == (2, True)
    remote("schedule", "create", "twice", "--topic", "t", "--cron", "0 * * * *", "--tz", "UTC")
    assert remote("schedule", "create", "twice", "--topic", "t", "--cron", "0 * * * *", "--tz", "UTC").code == 5
    near = remote("schedule", "show", "twic")
    assert (near.code, "Did you mean twice?" in near.err) == (3, True)
    monkeypatch.setenv("TIMEBELL_API_KEY", "tb_live_wrong_key")
    assert remote("schedule", "list").code == 4
    monkeypatch.delenv("TIMEBELL_API_KEY")
    monkeypatch.setenv("TIMEBELL_URL", f"http://127.0.0.1:{free_port()}")
    lost = remote("schedule", "list")
    assert (lost.code, "SERVER_UNREACHABLE" in lost.err) == (6, True)


def test_shell_completes_commands_flags_and_names(remote: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "complete -o nosort -F _timebell_completion timebell" in remote("completion", "bash").out
    assert remote("completion", "tcsh").code == 2
    remote("schedule", "create", "completed-name", "--topic", "t", "--cron", "0 * * * *", "--tz", "UTC")

    def completions(words: str, shell: str = "bash") -> list[str]:
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
        monkeypatch.setenv("_TIMEBELL_COMPLETE", f"{shell}_complete")
        return [line.partition(",")[2] for line in remote().out.split()]

    assert completions("timebell sched") == ["schedule"]
    assert "--timezone" in completions("timebell schedule create --t")
    assert completions("timebell schedule show compl") == ["completed-name"]


def test_settings_are_shown_with_their_origin(remote: Cli) -> None:
    rows = {row["setting"]: row for row in as_json(remote("config", "show", "--origin", "-o", "json"))}
    assert rows["url"]["origin"] == "TIMEBELL_URL"
    assert (rows["database_url"]["value"], rows["secret_key"]["value"]) == ("(set)", None)
    raw = json.loads(remote("api", "GET", "/schedules?limit=1").out)
    assert raw.keys() == {"items", "nextCursor"}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver of webhooks on this machine."""
    created = Receiver()
    thread = threading.Thread(target=created.serve_forever)
    thread.start()
    yield created
    created.shutdown()
    thread.join()
    created.server_close()


class Receiver(HTTPServer):
    """Answers with the status in the path, and records the requests."""

    def __init__(self) -> None:
        self.received: list[tuple[dict[str, str], bytes]] = []
        super().__init__(("127.0.0.1", 0), Answers)

    def url(self, status: int) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{status}"


class Answers(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append(({name.lower(): value for name, value in self.headers.items()}, body))
        self.send_response(int(self.path[1:4]))
        self.end_headers()
        self.wfile.write(b"thanks")

    do_PUT = do_POST  # noqa: N815

    def log_message(self, *args: Any) -> None:
        """Suppress the log line."""


def test_flags_describe_the_request_of_a_target(remote: Cli, receiver: Receiver) -> None:
    assert remote("secret", "set", "pass", stdin="sesame-open\n").code == 0
    url = receiver.url(202)
    created = remote(
        "target", "create", "crm", url, "--method", "put", "--query", "topic={{topic}}", "--text", "a {{payload.b}}",
        "--content-type", "text/x-own", "--unsigned", "--timeout", "10m", "--success", "202,4xx", "--contains",
        "thanks", "--follow-redirects", "--basic", "app=pass", "--concurrency", "2", "--rate", "10/1m", "-o", "json",
    )  # fmt: skip
    assert created.code == 0, created.err
    assert json.loads(created.out)["options"] == {
        "url": url, "method": "PUT", "query": {"topic": "{{topic}}"}, "body": "text", "template": "a {{payload.b}}",
        "contentType": "text/x-own", "signed": False, "timeout": "10m", "success": [202, "4xx"],
        "expect": {"contains": "thanks"}, "followRedirects": True, "concurrency": 2, "rate": 10, "perSeconds": 60.0,
        "auth": {"type": "basic", "username": "app", "password": {"secret": "pass"}},
    }  # fmt: skip
    tried = remote("target", "test", "crm", "--payload", '{"b": "c"}')
    assert tried.code == 0, tried.out
    headers, body = receiver.received[0]
    assert (headers["content-type"], body) == ("text/x-own", b"a c")
    for expected in (f"> PUT {url}?topic=timebell.test", "> authorization: Basic ***", "> a c", "< 202", "< server: "):
        assert expected in tried.out, tried.out
    failed = remote("target", "test", "crm", "--payload", "{}")
    assert (failed.code, "INVALID_BODY" in failed.out) == (1, True)
    assert remote("target", "create", "x", url, "--rate", "often").code == 2
    assert remote("target", "create", "x", url, "--method", "FETCH").code == 2
    assert remote("target", "delete", "crm", "--yes").code == 0
    assert remote("secret", "delete", "pass", "--yes").code == 0


def test_target_is_created_tested_and_rotated(remote: Cli, receiver: Receiver) -> None:
    assert remote("secret", "set", "token", stdin="sesame-open\n").code == 0
    created = remote(
        "target", "create", "orders", receiver.url(200), "--header", "x-team=shop", "--secret-header", "x-key=token"
    )
    assert created.code == 0, created.err
    (secret,) = re.findall(r"whsec_\S+", created.out)
    assert "shown only once" in created.err
    assert remote("target", "create", "orders", receiver.url(200)).code == 5
    tried = remote("target", "test", "orders")
    assert tried.code == 0, tried.err
    (headers, body), *_ = receiver.received
    assert headers["x-key"] == "sesame-open"
    for expected in ("delivered", f"> POST {receiver.url(200)}", f"> webhook-signature: {headers['webhook-signature']}",
                 "> x-team: shop", "> x-key: ***", f"> {body.decode()}", "< 200", "< thanks"):  # fmt: skip
        assert expected in tried.out, (expected, tried.out)
    assert "sesame" not in tried.out + tried.err
    assert as_json(remote("target", "test", "orders", "-o", "json"))["delivered"] is True
    Webhook(secret).verify(body, headers)
    new = as_json(remote("target", "rotate-secret", "orders", "--overlap", "1h", "-o", "json"))["signingSecret"]
    assert remote("target", "test", "orders").code == 0
    for each in (secret, new):
        Webhook(each).verify(receiver.received[-1][1], receiver.received[-1][0])
    assert "signs until" in remote("target", "show", "orders").out
    job = as_json(remote("job", "create", "order.paid", "--tz", "UTC", "--target", "orders", "-o", "json"))
    assert job["target"] == {"name": "orders"}
    assert remote("target", "create", "orders", receiver.url(500), "--replace").code == 0
    failed = remote("target", "test", "orders")
    assert (failed.code, "HTTP_STATUS" in failed.out, "< 500" in failed.out) == (1, True, True)
    assert "orders" in remote("target", "list").out
    assert [one["name"] for one in as_json(remote("secret", "list", "-o", "json"))] == ["token"]
    assert remote("secret", "delete", "token", "--yes").code == 0
    assert remote("target", "test", "missing").code == 3
    assert remote("job", "create", "order.paid", "--tz", "UTC", "--target", "missing").code == 3


def test_targets_are_applied_and_exported_with_their_schedules(remote: Cli, receiver: Receiver, tmp_path: Path) -> None:
    assert remote("secret", "set", "key", stdin="abracadabra").code == 0
    file = tmp_path / "all.yaml"
    file.write_text(f"""
kind: Target
name: invoices
type: http
options: {{url: "{receiver.url(200)}", headers: {{x-key: {{secret: key}}}}}}
---
name: by-name
cronExpression: "0 5 * * *"
timezone: UTC
topic: invoices.send
target: invoices
""")
    diff = remote("apply", "-f", file, "--diff")
    assert (diff.code, "+ target invoices" in diff.out, "2 to create" in diff.err) == (7, True, True)
    done = remote("apply", "-f", file)
    assert (done.code, len(re.findall("whsec_", done.err))) == (0, 1), done.err
    assert remote("apply", "-f", file, "--diff").code == 0
    exported = remote("export").out
    assert "abracadabra" not in exported
    assert "whsec_" not in exported
    bodies = {(body.get("kind"), body["name"]): body for body in yaml.safe_load_all(exported)}
    assert bodies["Target", "invoices"]["options"]["headers"] == {"x-key": {"secret": "key"}}
    assert bodies[None, "by-name"]["target"] == {"name": "invoices"}
    file.write_text(exported)
    assert remote("apply", "-f", file, "--diff").code == 0
    file.write_text(exported.replace("/200", "/202"))
    changed = remote("apply", "-f", file, "--diff")
    assert (changed.code, "~ target invoices" in changed.out, "/202" in changed.out) == (7, True, True)
    assert remote("apply", "-f", file).code == 0
    assert as_json(remote("target", "show", "invoices", "-o", "json"))["revision"] == 2
    refused = remote("target", "delete", "invoices", "--yes")
    assert (refused.code, "1 schedule" in refused.err) == (5, True)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("kind: Target\nname: x\nurl: https://example.com\n")
    assert remote("apply", "-f", wrong).code == 2


def test_triggers_and_sources_are_managed(remote: Cli) -> None:
    created = as_json(remote("source", "create", "shifts", "-o", "json"))
    assert created["hook"] == f"/api/v1/hooks/{created['id']}"
    create = ("trigger", "create", "start", "--source", "shifts", "--column", "start_at", "--topic", "mail.send")
    done = remote(*create, "--offset", "-15m", "--offset", "0", "--condition", '{"a": 1}')
    assert (done.code, "INVALID_CONDITION" in done.err or "INVALID_FIELDS" in done.err) == (2, True), done.err
    condition = '[{"field": "status", "op": "eq", "value": "active"}]'
    done = remote(*create, "--offset", "-15m", "--offset", "0", "--condition", condition, "--payload", '{"say": "hi"}')
    assert done.code == 0, done.err
    assert "start_at -15m, 0" in done.out
    assert "scan completed" in done.err
    assert remote(*create).code == 5
    (row,) = as_json(remote("trigger", "list", "-o", "json"))
    assert (row["offsets"], row["condition"], row["enabled"]) == (["-15m", "0"], json.loads(condition), True)
    ours = json.dumps([{"start_at": "2040-03-01T09:00:00Z", "status": "active"}, {"start_at": "20260-05-01"}])
    shown = remote("trigger", "preview", "start", ours).out
    assert "-15m       2040-03-01T08:45:00Z" in shown
    assert "start_at: '20260-05-01'  the condition does not hold now" in shown
    for key, at in (("7", "2040-03-01T09:00:00Z"), ("8", "20260-05-01")):
        body = json.dumps({"items": [{"key": key, "fields": {"start_at": at}}]})
        assert remote("api", "POST", "/sources/shifts/items", "--data", body).code == 0
    assert "-15m: planned for 2040-03-01T08:45:00Z" in remote("trigger", "item", "start", "7").out
    assert "unreadable" in remote("trigger", "not-fired", "start").out
    assert remote("trigger", "fire", "start", "7").code == 0
    assert "2040-03-01T08:45:00Z" in remote("trigger", "skip", "start", "7").out
    assert "not fired, skipped: 2040-03-01T08:45:00Z" in remote("trigger", "item", "start", "7").out
    assert "ITEM_NOT_FOUND" in remote("trigger", "fire", "start", "9").err
    assert "paused" in remote("trigger", "pause", "start", "--reason", "holiday").out
    assert "ready" in remote("trigger", "resume", "start").out
    assert remote("trigger", "scan", "start").code == 0
    assert "TRIGGER_NOT_FOUND" in remote("trigger", "show", "missing").err
    zoned = ("--zone-column", "tz", "--timezone", "UTC", "--edge", "end", "--offset", "-1d@09:00")
    last = ("trigger", "create", "last", "--source", "shifts", "--column", "during", "--topic", "mail.send", *zoned)
    assert remote(*last, "--edge", "middle").code == 2
    shown = remote(*last).out
    assert re.search(r"zone column +tz", shown), shown
    assert re.search(r"edge +end", shown), shown
    ours = json.dumps([{"during": "2040-03-01/2040-03-05", "tz": "Asia/Seoul"}, {"during": {"from": "2040-03-01"}}])
    shown = remote("trigger", "preview", "last", ours).out
    assert "row 1: local times in Asia/Seoul\n  -1d@09:00  2040-03-04T00:00:00Z" in shown
    assert "row 2: local times in UTC\n  no date, so nothing fires" in shown
    assert remote("trigger", "delete", "last", "--yes").code == 0
    assert remote("source", "delete", "shifts", "--yes").code == 5
    assert remote("trigger", "delete", "start", "--yes").code == 0
    assert remote("source", "delete", "shifts", "--yes").code == 0
    options = '{"url": "postgresql://nowhere/x", "table": "duty_schedules", "changes": "outbox", "everySeconds": 60}'
    assert remote("source", "create", "duty", "--kind", "sql", "--options", options).code == 0
    sql = remote("trigger", "install", "duty", "--print").out
    assert 'CREATE TRIGGER "timebell_items_duty_schedules_id"' in sql
    assert "DROP TRIGGER" in remote("trigger", "uninstall", "duty", "--print").out
    assert "could not be run" in remote("trigger", "install", "duty").err
    assert "duty" in remote("source", "list").out
    assert remote("source", "delete", "duty", "--yes").code == 0


def test_devices_are_imported_shown_and_deleted(remote: Cli, tmp_path: Path) -> None:
    file = tmp_path / "people.csv"
    file.write_text('token,userId,tier,age\nphone-0001,ann,"go\nld",\nphone-0002,ann,,old\nphone-0003,bob,,31\n')
    text = remote("device", "import", str(file), "--preview", "-o", "json").out
    preview, _ = json.JSONDecoder().raw_decode(text)
    assert preview == {"token": "phone-0001", "userId": "ann", "attributes": {"tier": "go\nld"}}
    done = remote("device", "import", str(file))
    assert (done.code, "2 new, 0 known, 1 refused" in done.out) == (1, True), done.err
    rejected = json.loads((tmp_path / "people.csv.rejected.ndjson").read_text())
    assert (rejected["line"], rejected["text"], "age" in rejected["reason"]) == (4, "phone-0002,ann,,old", True)
    packed = tmp_path / "more.ndjson.gz"
    packed.write_bytes(gzip.compress(b'{"token": "phone-0001"}\n{"token": "phone-0004", "userId": "cem"}\n'))
    assert "1 new, 1 known, 0 refused" in remote("device", "import", str(packed)).out
    assert "phone-0004" in remote("device", "show", "--user", "cem").out
    assert remote("device", "delete", "--token", "phone-0004", "--yes").code == 0
    assert remote("device", "show", "--token", "phone-0004").code == 3
    file.write_text("token,pushon of,pushonof\nphone-0001,N,N\n")
    assert "Did you mean pushOnOff" in remote("device", "import", str(file)).err


def test_campaign_is_created_shown_and_managed(remote: Cli) -> None:
    flags = ("--title", "Hello", "--at", "2035-03-01T16:15:00", "--tz", "Asia/Seoul")
    created = as_json(
        remote(
            "campaign",
            "create",
            *flags,
            "--filter",
            "ageMin=20",
            "--filter",
            "tier=gold",
            "--filter",
            'not={"language": ["ko", "en"]}',
            "-o",
            "json",
        )
    )
    assert (created["state"], created["sendAt"]) == ("pending", "2035-03-01T07:15:00Z")
    assert created["filters"] == {
        "ageMin": 20, "attributes": {"tier": "gold"}, "not": {"language": ["ko", "en"]},
    }  # fmt: skip
    assert "Hello" in remote("campaign", "status", created["id"]).out
    assert created["id"] in remote("campaign", "list", "--state", "pending").out
    assert '"title": "Hello"' in remote("campaign", "preview", created["id"]).out
    output = as_json(remote("campaign", "preview", created["id"], "-o", "json"))
    assert (output["request"]["message"]["notification"], output["timetable"]["zones"]) == ({"title": "Hello"}, [])
    assert remote("campaign", "preview", created["id"], "--variant", "B").code == 2  # the message has no variants
    assert remote("campaign", "preview", created["id"], "--user", "nobody").code == 3
    assert remote("campaign", "pause", created["id"]).code == 5  # the campaign has not started
    assert as_json(remote("campaign", "stop", created["id"], "-y", "--reason", "no", "-o", "json"))["reason"] == "no"
    assert remote("campaign", "status", created["id"], "--watch").code == 1
    assert remote("campaign", "export", created["id"]).out.startswith("deviceId,userId,state,")
    assert remote("campaign", "export", created["id"], "--format", "ndjson").out == ""
    assert remote("campaign", "export", "no-such").code == 3
    assert remote("campaign", "archive", created["id"]).code == 0
    assert created["id"] not in remote("campaign", "list").out
    assert created["id"] in remote("campaign", "list", "--archived").out
    assert remote("campaign", "unarchive", created["id"]).code == 0
    assert remote("campaign", "test", created["id"]).code == 2
    assert remote("campaign", "status", "no-such").code == 3
    assert remote("campaign", "delete", created["id"], "-y").code == 0
    assert remote("campaign", "status", created["id"]).code == 3


def test_segments_are_set_shown_and_deleted(remote: Cli) -> None:
    assert remote("segment", "set", "gold, ios", "--filter", "platform=ios", "--filter", "tier=gold").code == 0
    assert remote("segment", "set", "others", "--filter", 'not={"segment": "gold, ios"}').code == 0
    assert remote("segment", "set", " gold", "--filter", "platform=ios").code == 2
    assert "gold, ios" in remote("segment", "list").out
    shown = as_json(remote("segment", "show", "gold, ios", "-o", "json"))
    assert (shown["filters"], shown["count"]) == ({"platform": "ios", "attributes": {"tier": "gold"}}, 0)
    assert remote("segment", "delete", "gold, ios", "-y").code == 5  # others uses it
    assert remote("segment", "delete", "others", "-y").code == 0
    assert remote("segment", "delete", "gold, ios", "-y").code == 0
    assert remote("segment", "show", "gold, ios").code == 3


def test_watching_a_campaign_survives_a_restart_of_the_server(
    remote: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    created = as_json(
        remote("campaign", "create", "--title", "Hello", "--at", "2035-03-01T16:15", "--tz", "UTC", "-o", "json")
    )
    commands = importlib.import_module("timebell.features.campaigns.cli.campaign")
    calls: list[str] = []
    request = ServerClient.request

    def restart(self: ServerClient, method: str, path: str, *args: Any, **more: Any) -> Any:
        calls.append(path)
        if 2 <= len(calls) <= 4:
            raise ServerUnreachable("The server does not respond.")
        if len(calls) == 5:
            request(self, "POST", f"{path}/stop", {})
        return request(self, method, path, *args, **more)

    monkeypatch.setattr(ServerClient, "request", restart)
    monkeypatch.setattr(commands, "POLL_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(commands, "RECONNECT_INTERVAL_SECONDS", 0.01)
    done = remote("campaign", "status", created["id"], "--watch")
    assert (done.code, len(calls)) == (1, 5)
    assert done.err.count("does not respond. Trying again.") == 1
    assert "stopped" in done.out


class OtherServer(BaseHTTPRequestHandler):
    """A server that is not Timebell: it answers every request with a page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b"<html>\n")

    def log_message(self, *args: Any) -> None:
        """Suppress the log line."""


@pytest.fixture
def other_cli(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """Run `timebell ...` against a server that is not Timebell."""
    created = HTTPServer(("127.0.0.1", 0), OtherServer)
    thread = threading.Thread(target=created.serve_forever)
    thread.start()
    monkeypatch.setenv("TIMEBELL_URL", f"http://127.0.0.1:{created.server_address[1]}/")
    yield cli
    created.shutdown()
    thread.join()
    created.server_close()


def test_responses_of_another_server_are_refused(other_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    done = other_cli("schedule", "list")
    assert (done.code, "is not from a Timebell server" in done.err) == (1, True), done.err
    monkeypatch.setenv("TIMEBELL_API_KEY", "two\nlines")
    assert "SERVER_UNREACHABLE" in other_cli("schedule", "list").err
    for url in ("127.0.0.1:8700", "http://", "http://[::1", "ftp://127.0.0.1"):
        monkeypatch.setenv("TIMEBELL_URL", url)
        done = other_cli("schedule", "list")
        assert (done.code, "SERVER_UNREACHABLE" in done.err) == (6, True), done.err


def test_a_request_whose_connection_is_lost_is_repeated_except_for_patch(
    other_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[tuple[str, str | None]] = []

    def hang_up(self: OtherServer) -> None:
        received.append((self.command, self.headers["Idempotency-Key"]))
        self.close_connection = True

    for method, body in (("GET", None), ("POST", {}), ("PATCH", {})):
        monkeypatch.setattr(OtherServer, f"do_{method}", hang_up, raising=False)
        with pytest.raises(ServerUnreachable):
            ServerClient().request(method, "/schedules", body)
    assert [method for method, _ in received] == ["GET", "GET", "POST", "POST", "PATCH"]
    assert received[2] == received[3]  # the same key: the server answers the second one with its first response


def test_an_incomplete_download_fails(other_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def send_half(self: OtherServer) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"5\r\nhalf\n\r\n")

    monkeypatch.setattr(OtherServer, "do_GET", send_half)
    done = other_cli("campaign", "export", "any")
    assert (done.code, done.out, "SERVER_UNREACHABLE" in done.err) == (6, "half\n", True)


def test_streams_have_no_read_timeout(other_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    created, connect = [], HTTPConnection.connect

    def connected(self: HTTPConnection) -> None:
        connect(self)
        created.append(self.sock)

    monkeypatch.setattr(HTTPConnection, "connect", connected)
    lines = ServerClient().stream_lines("/events")
    assert next(lines) == "<html>"
    assert created[0].gettimeout() is None
    assert list(lines) == []


def test_audit_log_is_listed_filtered_and_exported(remote: Cli) -> None:
    assert remote("schedule", "create", "audited", "--cron", "0 0 1 1 *", "-z", "UTC", "--topic", "mail.send").code == 0
    assert remote("schedule", "pause", "audited", "--reason", "quiet").code == 0
    table = remote("audit-log", "list", "--subject", "audited", "--since", "1h")
    assert re.search(r"local +127\.0\.0\.1 +schedule\.pause +audited", table.out), table.out
    [paused] = as_json(remote("audit-log", "list", "--action", "schedule.pause", "--subject", "audited", "-o", "json"))
    assert {"field": "/pauseReason", "before": None, "after": "quiet"} in paused["changes"]
    exported = [json.loads(line) for line in remote("audit-log", "export", "--subject", "audited").out.splitlines()]
    assert [one["action"] for one in exported] == ["schedule.create", "schedule.pause"]
    assert exported[1] == paused
    assert remote("audit-log", "export", "--subject", "audited", "--until", "1h").out.strip() == ""
    assert remote("audit-log", "list", "--since", "yesterday").code == 2


def test_audit_asks_the_server_day_by_day(remote: Cli) -> None:
    recent = remote("audit", "--from", "50h")
    assert (recent.code, recent.out) == (0, ""), recent.err
    assert "0 differences." in recent.err
    assert as_json(remote("audit", "-o", "json")) == []
    assert remote("audit", "--schedule", "missing").code == 3
    assert "AUDIT_TOO_OLD" in remote("audit", "--from", "2020-01-01T00:00:00Z", "--to", "2020-01-02T00:00:00Z").err
    local = remote("audit", "--from", "2027-01-01T00:00:00")
    assert (local.code, "INVALID_INSTANT" in local.err, "24h" in local.err) == (2, True, True)
    assert remote("audit", "--database", "sqlite:///nowhere.db").code == 6


def test_a_job_due_now_needs_no_time_zone(remote: Cli) -> None:
    assert as_json(remote("job", "create", "mail.send", "-o", "json"))["timezone"] == "UTC"
    assert as_json(remote("job", "create", "mail.send", "--dry-run", "-o", "json"))["job"]["timezone"] == "UTC"
    done = remote("job", "create", "mail.send", "--at", "2040-01-01T00:00:00+09:00")
    assert (done.code, "TIMEZONE_MISSING" in done.err) == (2, True)


def test_an_empty_time_zone_is_refused_instead_of_replaced_by_the_default(
    remote: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIMEBELL_DEFAULT_TIMEZONE", "Asia/Seoul")
    schedule = ("schedule", "create", "daily", "--cron", "0 9 * * *", "--topic", "mail.send")
    for command in (schedule, ("job", "create", "mail.send")):
        assert remote(*command, "--dry-run").code == 0
        refused = remote(*command, "--timezone", "", "--dry-run")
        assert refused.code != 0
        assert "INVALID_TIMEZONE" in refused.err
