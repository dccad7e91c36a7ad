"""Commands that speak to a server: a real one, started for all of them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from standardwebhooks.webhooks import Webhook

from tests.servers import free_port
from timebell.cli.remote import Remote

from .conftest import Cli
from .process import Process

APP = """
from timebell import Timebell
app = Timebell()

@app.on("mail.send")
async def send(event):
    return {"sent": event.payload}

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
def ask(cli: Cli, server: str, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run `timebell ...` against the server."""
    monkeypatch.setenv("TIMEBELL_URL", server)
    return cli


def as_json(done: Any) -> Any:
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_what_waits_to_be_recovered_is_shown_and_let_go(ask: Cli) -> None:
    shown = ask("recover")
    assert (shown.code, shown.err.strip()) == (0, "None.")
    assert as_json(ask("recover", "-o", "json")) == []
    for verb in ("release", "discard"):
        assert as_json(ask("recover", f"--{verb}", "--yes", "-o", "json")) == {"jobs": 0}
    assert ask("recover", "--release", "--discard").code == 2
    assert ask("recover", "nobody", "--release").code == 3


def test_a_schedule_is_made_shown_edited_steered_and_deleted(ask: Cli) -> None:
    made = as_json(ask(
        "schedule", "create", "nightly", "--topic", "report.build", "--cron", "0 2 * * *", "--tz", "America/New_York",
        "--payload", '{"a": 1}', "--retries", 5, "--label", "team=billing", "-o", "json",
    ))  # fmt: skip
    assert (made["maxRetries"], made["labels"], made["payload"]) == (5, {"team": "billing"}, {"a": 1})
    line = next(line for line in ask("schedule", "list").out.splitlines() if line.startswith("nightly"))
    assert re.search(r"nightly +At 02:00 +America/New_York +in .+ E[SD]T +healthy", line)
    shown = ask("schedule", "show", "nightly").out
    assert "report.build" in shown
    assert shown.count("T02:00:00-0") == 5
    assert as_json(ask("schedule", "edit", "nightly", "--cron", "0 3 * * *", "-o", "json"))["revision"] == 2
    stale = ask("schedule", "edit", "nightly", "--priority", 1, "--revision", 1)
    assert stale.code == 5
    assert "local changed it last" in stale.err
    assert "REVISION_STALE" in stale.err
    assert as_json(ask("schedule", "pause", "nightly", "-r", "month end", "-o", "json"))["pauseReason"] == "month end"
    assert "paused" in ask("schedule", "list", "--paused").out
    assert as_json(ask("schedule", "resume", "nightly", "-o", "json"))["enabled"] is True
    skipped = as_json(ask("schedule", "skip-next", "nightly", "-o", "json"))
    assert len(skipped["overrides"]) == 1
    assert as_json(ask("schedule", "trigger", "nightly", "-o", "json"))["kind"] == "manual"
    runs = as_json(ask("schedule", "history", "nightly", "-o", "json"))
    assert [run["kind"] for run in runs] == ["manual"]
    revisions = ask("schedule", "history", "nightly", "--revisions").out.splitlines()
    assert [line.split()[0] for line in revisions] == ["REVISION", "3", "2", "1"]
    assert as_json(ask("schedule", "revert", "nightly", 1, "-o", "json"))["cronExpression"] == "0 2 * * *"
    asked = ask("schedule", "delete", "nightly")
    assert (asked.code, "--yes" in asked.err) == (2, True)
    assert ask("schedule", "delete", "nightly", "--yes").code == 0
    gone = ask("schedule", "show", "nightly")
    assert (gone.code, "SCHEDULE_NOT_FOUND" in gone.err) == (3, True)


def test_backfill_says_first_what_it_would_do(ask: Cli) -> None:
    ask("schedule", "create", "daily", "--topic", "t.t", "--cron", "30 2 * * *", "--tz", "Europe/Paris")
    span = ("--from", "2026-11-01", "--to", "2026-11-04")
    planned = ask("schedule", "backfill", "daily", *span, "--dry-run")
    assert "Would fire 3 times (01 Nov 02:30 to 03 Nov 02:30 CET), one after another." in planned.err
    assert ask("schedule", "history", "daily", "-o", "json").out.strip() == "[]"
    assert "3 made." in ask("schedule", "backfill", "daily", *span, "--yes").err
    again = ask("schedule", "backfill", "daily", *span, "--yes")
    assert "There is nothing to run in that time. 3 ran already and are left alone." in again.err


def test_files_are_applied_compared_and_pruned(ask: Cli, tmp_path: Path) -> None:
    ask("schedule", "create", "a", "--topic", "t.t", "--every", "PT15M", "--tz", "UTC", "--payload", '{"x": [1, 2]}')
    exported = ask("export").out
    bodies = {body["name"]: body for body in yaml.safe_load_all(exported)}
    assert bodies["a"]["interval"]["everyMs"] == 900_000
    assert "from-code" not in bodies
    folder = tmp_path / "schedules"
    folder.mkdir()
    (folder / "all.yaml").write_text(exported)
    same = ask("apply", "-f", folder, "--diff")
    assert (same.code, same.out) == (0, ""), same.out
    changed = exported.replace("900000", "60000") + "\n---\nname: b\ncronExpression: '0 5 * * *'\ntimezone: UTC\n"
    (folder / "all.yaml").write_text(changed + "topic: on\nstartAt: 2027-01-01T00:00:00Z\n")
    seen = ask("apply", "-f", folder, "--diff")
    assert seen.code == 7
    assert "~ a\n    interval: " in seen.out
    assert "+ b  0 5 * * *  UTC" in seen.out
    assert "1 to change, 1 to create, 0 to delete. Nothing done (--diff)." in seen.err
    assert ask("apply", "-f", folder).code == 0
    assert ask("apply", "-f", folder, "--diff").code == 0
    made = as_json(ask("schedule", "show", "b", "-o", "json"))
    assert (made["topic"], made["startAt"]) == ("on", "2027-01-01T00:00:00Z")
    (folder / "all.yaml").write_text("name: b\ncronExpression: '0 5 * * *'\ntimezone: UTC\ntopic: on\n")
    refused = ask("apply", "-f", folder, "--prune")
    assert (refused.code, "CONFIRMATION_MISSING" in refused.err) == (2, True)
    assert ask("apply", "-f", folder, "--prune", "--yes").code == 0
    names = {one["name"] for one in as_json(ask("schedule", "list", "-o", "json"))}
    assert names == {"b", "from-code"}
    (folder / "all.yaml").write_text("name: c\ncronExpression: '99 * * * *'\ntimezone: UTC\ntopic: t\n---\nname: d\n")
    wrong = ask("apply", "-f", folder)
    assert (wrong.code, "c: 99 in minute is out of range" in wrong.err) == (2, True)
    assert {one["name"] for one in as_json(ask("schedule", "list", "-o", "json"))} == names, "nothing was written"


def test_what_comes_across_schedules_and_as_icalendar(ask: Cli) -> None:
    ask("schedule", "create", "hourly", "--topic", "t.t", "--cron", "0 * * * *", "--tz", "Asia/Seoul")
    fires = as_json(ask("calendar", "--days", 1, "--topic", "t.t", "-o", "json"))
    assert len([fire for fire in fires if fire["schedule"] == "hourly"]) == 24
    assert "hourly  Asia/Seoul" in ask("calendar", "--days", 1, "--topic", "t.t").out
    ics = ask("calendar", "--days", 1, "--topic", "t.t", "--ics").out
    assert ics.startswith("BEGIN:VCALENDAR\r\nVERSION:2.0\r\n")
    assert ics.count("BEGIN:VEVENT") == len(fires)
    assert all(len(line.encode()) <= 75 for line in ics.split("\r\n"))


def test_what_a_job_sends_is_shown_before_recorded_and_sent_again(ask: Cli) -> None:
    target = '{"kind": "command", "argv": ["/bin/cat"], "template": {"to": "{{payload.to}}"}}'
    given = ("job", "create", "mail.post", "--tz", "UTC", "--payload", '{"to": "ana"}', "--target", target)
    shown = ask(*given, "--dry-run")
    assert '["/bin/cat"]\n{"to":"ana"}\n' in shown.out
    assert "Nothing was made" in shown.err
    refused = ask(*given[:-3], "{}", "--target", target, "--dry-run")
    assert (refused.code, "BODY_UNFIT" in refused.err) == (2, True)
    id_ = as_json(ask(*given, "-o", "json"))["id"]

    def ended(attempts: int) -> Any:
        for _ in range(1000):
            job = as_json(ask("job", "show", id_, "-o", "json"))
            if job["status"] == "completed" and len(job["attempts"]) == attempts:
                return job
        raise AssertionError(job)

    assert ended(1)["result"]["stdout"] == '{"to":"ana"}\n'
    assert as_json(ask("job", "resend", id_, "-o", "json"))["status"] in ("pending", "running", "completed")
    assert [one["messageId"] for one in ended(2)["attempts"]] == [id_, f"{id_}.r1"]
    assert re.search(rf"sent +\S+  attempt 2 to command in [0-9.]+ ms, message {id_}\.r1", ask("job", "show", id_).out)


def test_errors_have_their_exit_codes(ask: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = ask("schedule", "create", "x", "--topic", "t", "--cron", "61 * * * *", "--tz", "UTC")
    assert (bad.code, "INVALID_CRON" in bad.err, bad.out) == (2, True, "")
    misspelt = ask("schedule", "create", "x", "--topic", "t", "--cron", "0 * * * *", "--tz", "Europe/Pariss")
    assert (misspelt.code, "Invalid timezone: Europe/Pariss. Use IANA format" in misspelt.err) == (2, True)
    ask("schedule", "create", "twice", "--topic", "t", "--cron", "0 * * * *", "--tz", "UTC")
    assert ask("schedule", "create", "twice", "--topic", "t", "--cron", "0 * * * *", "--tz", "UTC").code == 5
    near = ask("schedule", "show", "twic")
    assert (near.code, "Did you mean twice?" in near.err) == (3, True)
    monkeypatch.setenv("TIMEBELL_API_KEY", "tb_live_wrong_key")
    assert ask("schedule", "list").code == 4
    monkeypatch.delenv("TIMEBELL_API_KEY")
    monkeypatch.setenv("TIMEBELL_URL", f"http://127.0.0.1:{free_port()}")
    lost = ask("schedule", "list")
    assert (lost.code, "SERVER_UNREACHABLE" in lost.err) == (6, True)


def test_a_shell_completes_commands_flags_and_names(ask: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "complete -o nosort -F _timebell_completion timebell" in ask("completion", "bash").out
    assert ask("completion", "tcsh").code == 2
    ask("schedule", "create", "completed-name", "--topic", "t", "--cron", "0 * * * *", "--tz", "UTC")

    def offered(words: str, shell: str = "bash") -> list[str]:
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
        monkeypatch.setenv("_TIMEBELL_COMPLETE", f"{shell}_complete")
        return [line.partition(",")[2] for line in ask().out.split()]

    assert offered("timebell sched") == ["schedule"]
    assert "--timezone" in offered("timebell schedule create --t")
    assert offered("timebell schedule show compl") == ["completed-name"]


def test_settings_and_where_they_come_from(ask: Cli) -> None:
    rows = {row["setting"]: row for row in as_json(ask("config", "show", "--origin", "-o", "json"))}
    assert rows["url"]["origin"] == "TIMEBELL_URL"
    assert (rows["database_url"]["value"], rows["secret_key"]["value"]) == ("(set)", None)
    raw = json.loads(ask("api", "GET", "/schedules?limit=1").out)
    assert raw.keys() == {"items", "nextCursor"}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver of webhooks on this machine."""
    made = Receiver()
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


class Receiver(HTTPServer):
    """Answers with the status that the path says, and remembers what came."""

    def __init__(self) -> None:
        self.came: list[tuple[dict[str, str], bytes]] = []
        super().__init__(("127.0.0.1", 0), Answers)

    def url(self, status: int) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{status}"


class Answers(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.came.append(({name.lower(): value for name, value in self.headers.items()}, body))
        self.send_response(int(self.path[1:]))
        self.end_headers()
        self.wfile.write(b"thanks")

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


def test_a_target_is_made_tested_rotated_and_deleted(ask: Cli, receiver: Receiver) -> None:
    assert ask("secret", "set", "token", stdin="sesame-open\n").code == 0
    made = ask(
        "target", "add", "orders", receiver.url(200), "--header", "x-team=shop", "--secret-header", "x-key=token"
    )
    assert made.code == 0, made.err
    (secret,) = re.findall(r"whsec_\S+", made.out)
    assert "this once" in made.err
    assert ask("target", "add", "orders", receiver.url(200)).code == 5
    tried = ask("target", "test", "orders")
    assert tried.code == 0, tried.err
    (headers, body), *_ = receiver.came
    assert headers["x-key"] == "sesame-open"
    for said in ("delivered", f"> POST {receiver.url(200)}", f"> webhook-signature: {headers['webhook-signature']}",
                 "> x-team: shop", "> x-key: ***", f"> {body.decode()}", "< 200", "< thanks"):  # fmt: skip
        assert said in tried.out, (said, tried.out)
    assert "sesame" not in tried.out + tried.err
    assert as_json(ask("target", "test", "orders", "-o", "json"))["delivered"] is True
    Webhook(secret).verify(body, headers)
    new = as_json(ask("target", "rotate-secret", "orders", "--overlap", "1h", "-o", "json"))["signingSecret"]
    assert ask("target", "test", "orders").code == 0
    for each in (secret, new):
        Webhook(each).verify(receiver.came[-1][1], receiver.came[-1][0])
    assert "signs until" in ask("target", "show", "orders").out
    job = as_json(ask("job", "create", "order.paid", "--tz", "UTC", "--target", "orders", "-o", "json"))
    assert job["target"] == {"name": "orders"}
    assert ask("target", "add", "orders", receiver.url(500), "--replace").code == 0
    failed = ask("target", "test", "orders")
    assert (failed.code, "HTTP_STATUS" in failed.out, "< 500" in failed.out) == (1, True, True)
    assert "orders" in ask("target", "list").out
    assert [one["name"] for one in as_json(ask("secret", "list", "-o", "json"))] == ["token"]
    assert ask("secret", "delete", "token", "--yes").code == 0
    assert ask("target", "test", "nobody").code == 3
    assert ask("job", "create", "order.paid", "--tz", "UTC", "--target", "nobody").code == 3


def test_targets_are_applied_and_exported_with_what_names_them(ask: Cli, receiver: Receiver, tmp_path: Path) -> None:
    assert ask("secret", "set", "key", stdin="abracadabra").code == 0
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
    seen = ask("apply", "-f", file, "--diff")
    assert (seen.code, "+ target invoices" in seen.out, "2 to create" in seen.err) == (7, True, True)
    done = ask("apply", "-f", file)
    assert (done.code, len(re.findall("whsec_", done.err))) == (0, 1), done.err
    assert ask("apply", "-f", file, "--diff").code == 0
    exported = ask("export").out
    assert "abracadabra" not in exported
    assert "whsec_" not in exported
    bodies = {(body.get("kind"), body["name"]): body for body in yaml.safe_load_all(exported)}
    assert bodies["Target", "invoices"]["options"]["headers"] == {"x-key": {"secret": "key"}}
    assert bodies[None, "by-name"]["target"] == {"name": "invoices"}
    file.write_text(exported)
    assert ask("apply", "-f", file, "--diff").code == 0
    file.write_text(exported.replace("/200", "/202"))
    changed = ask("apply", "-f", file, "--diff")
    assert (changed.code, "~ target invoices" in changed.out, "/202" in changed.out) == (7, True, True)
    assert ask("apply", "-f", file).code == 0
    assert as_json(ask("target", "show", "invoices", "-o", "json"))["revision"] == 2
    refused = ask("target", "delete", "invoices", "--yes")
    assert (refused.code, "1 schedule" in refused.err) == (5, True)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("kind: Target\nname: x\nurl: https://example.com\n")
    assert ask("apply", "-f", wrong).code == 2


def test_triggers_and_their_sources(ask: Cli) -> None:
    made = as_json(ask("source", "add", "shifts", "-o", "json"))
    assert made["hook"] == f"/api/v1/hooks/{made['id']}"
    create = ("trigger", "create", "start", "--source", "shifts", "--column", "start_at", "--topic", "mail.send")
    done = ask(*create, "--offset", "-15m", "--offset", "0", "--condition", '{"a": 1}')
    assert (done.code, "INVALID_CONDITION" in done.err or "FIELDS_INVALID" in done.err) == (2, True), done.err
    condition = '[{"field": "status", "op": "eq", "value": "active"}]'
    done = ask(*create, "--offset", "-15m", "--offset", "0", "--condition", condition, "--payload", '{"say": "hi"}')
    assert done.code == 0, done.err
    assert "start_at -15m, 0" in done.out
    assert "scan completed" in done.err
    assert ask(*create).code == 5
    (row,) = as_json(ask("trigger", "list", "-o", "json"))
    assert (row["offsets"], row["condition"], row["enabled"]) == (["-15m", "0"], json.loads(condition), True)
    assert "paused" in ask("trigger", "pause", "start", "--reason", "holiday").out
    assert "ready" in ask("trigger", "resume", "start").out
    assert ask("trigger", "scan", "start").code == 0
    assert "TRIGGER_NOT_FOUND" in ask("trigger", "show", "nobody").err
    assert ask("source", "delete", "shifts", "--yes").code == 5
    assert ask("trigger", "delete", "start", "--yes").code == 0
    assert ask("source", "delete", "shifts", "--yes").code == 0
    options = '{"url": "postgresql://nowhere/x", "table": "duty_schedules", "changes": "notify", "everySeconds": 60}'
    assert ask("source", "add", "duty", "--kind", "sql", "--options", options).code == 0
    sql = ask("trigger", "install", "duty").out
    assert "CREATE TRIGGER timebell_items_duty_schedules" in sql
    assert "DROP TRIGGER" in sql
    assert "duty" in ask("source", "list").out
    assert ask("source", "delete", "duty", "--yes").code == 0


def test_a_campaign_is_made_shown_and_steered(ask: Cli) -> None:
    flags = ("--title", "Hello", "--at", "2035-03-01T16:15:00", "--tz", "Asia/Seoul")
    made = as_json(ask("campaign", "create", *flags, "--filter", "ageMin=20", "--filter", "tier=gold", "-o", "json"))
    assert (made["state"], made["sendAt"]) == ("pending", "2035-03-01T07:15:00Z")
    assert made["filters"] == {"ageMin": 20, "attributes": {"tier": "gold"}}
    assert "Hello" in ask("campaign", "status", made["id"]).out
    assert made["id"] in ask("campaign", "list", "--state", "pending").out
    assert '"title": "Hello"' in ask("campaign", "preview", made["id"]).out
    shown = as_json(ask("campaign", "preview", made["id"], "-o", "json"))
    assert (shown["request"]["message"]["notification"], shown["timetable"]["zones"]) == ({"title": "Hello"}, [])
    assert ask("campaign", "pause", made["id"]).code == 5  # it has not begun
    assert as_json(ask("campaign", "stop", made["id"], "-y", "--reason", "no", "-o", "json"))["reason"] == "no"
    assert ask("campaign", "status", made["id"], "--watch").code == 1
    assert ask("campaign", "test", made["id"]).code == 2
    assert ask("campaign", "status", "no-such").code == 3


class Odd(BaseHTTPRequestHandler):
    """No Timebell: a page for everything, and a line of what could be events."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b"<html>\n")

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def odd(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """Run `timebell ...` against what is none."""
    made = HTTPServer(("127.0.0.1", 0), Odd)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    monkeypatch.setenv("TIMEBELL_URL", f"http://127.0.0.1:{made.server_address[1]}/")
    yield cli
    made.shutdown()
    thread.join()
    made.server_close()


def test_what_answers_and_is_no_timebell(odd: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    done = odd("schedule", "list")
    assert (done.code, "not as Timebell does" in done.err) == (1, True), done.err
    monkeypatch.setenv("TIMEBELL_API_KEY", "two\nlines")
    assert "SERVER_UNREACHABLE" in odd("schedule", "list").err
    for url in ("127.0.0.1:8700", "http://", "http://[::1", "ftp://127.0.0.1"):
        monkeypatch.setenv("TIMEBELL_URL", url)
        done = odd("schedule", "list")
        assert (done.code, "SERVER_UNREACHABLE" in done.err) == (6, True), done.err


def test_what_does_not_end_may_be_silent_for_any_time(odd: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    made, connect = [], HTTPConnection.connect

    def connected(self: HTTPConnection) -> None:
        connect(self)
        made.append(self.sock)

    monkeypatch.setattr(HTTPConnection, "connect", connected)
    lines = Remote().lines("/events")
    assert next(lines) == "<html>"
    assert made[0].gettimeout() is None
    assert list(lines) == []
