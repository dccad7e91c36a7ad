"""`timebell dev` and `run`, as processes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import socket
import urllib.error
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Postgres, free_port
from timebell import Timebell
from timebell.cli import serve
from timebell.clock import system_now
from timebell.model.job import Job
from timebell_fcm_emulator import FakeFcm

from .conftest import Start
from .process import ROOT, until

QUICKSTART = ROOT / "examples" / "quickstart.py"
APP = """
import pathlib
from timebell import Timebell
app = Timebell()

@app.schedule("tick", every="PT1S", timezone="Asia/Seoul", topic="tick.tock")
async def tick(event):
    return WORD

@app.on("slow.work")
async def slow(event):
    import asyncio
    print("slow begins", flush=True)
    await asyncio.sleep(1)
    pathlib.Path("slow-ended").touch()

@app.on("bad.work", retry={"attempts": 2, "delay": 0.2})
def bad(event):
    raise ValueError("as expected")
"""


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def post(port: int, path: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api/v1{path}", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status in (200, 201)


def schedule(url: str, topic: str, **fields: Any) -> str:
    async def make() -> str:
        app = Timebell(url)
        try:
            return (await app.schedule_at(topic, system_now() + timedelta(seconds=0.3), timezone="UTC", **fields)).id
        finally:
            await app.close()

    return asyncio.run(make())


def job_of(url: str, id_: str) -> Job:
    async def find() -> Job:
        app = Timebell(url)
        try:
            return await app.get(id_)
        finally:
            await app.close()

    return asyncio.run(find())


@pytest.mark.slow
def test_quickstart_prints_its_fires_and_serves_the_dashboard(start: Start) -> None:
    port = free_port()
    process = start("dev", QUICKSTART, "--port", port)
    process.wait_for(f"dashboard http://127.0.0.1:{port}/ui/", err=True)
    process.wait_for(r"^\d\d:\d\d:\d\d\.\d{3} UTC +UTC +tea\.kettle-on +[\d.,]+ ms late  ok")
    process.wait_for(r"Tea is ready: 2 cups")
    process.wait_for(r"Europe/London +tea\.ready +.*ms late  ok")
    assert get(port, "/livez")[0] == 200
    assert get(port, "/readyz") == (200, '{"status":"ready"}')
    status, page = get(port, "/")
    assert status == 200
    for name in ("seoul", "new-york", "paris", "kettle"):
        assert name in page
    assert process.end() == 0
    process.wait_for("Stopped", err=True)
    assert "Traceback" not in process.err.read_text()


def test_dashboard_process_runs_beside_an_engine_process(start: Start, tmp_path: Path) -> None:
    url, port = f"sqlite:///{tmp_path}/timebell.db", free_port()
    environment = {"TIMEBELL_DATABASE_URL": url, "TIMEBELL_SECRET_KEY": "k" * 32}
    engine = start("run", "--roles", "planner,worker", **environment)
    engine.wait_for("Ready in", err=True)
    pages = start("run", "--roles", "ui", "--port", port, **environment)
    pages.wait_for("without an engine", err=True)
    assert get(port, "/readyz") == (200, '{"status":"ready"}')
    assert "Sign in to Timebell" in get(port, "/ui/")[1]
    assert get(port, "/api/v1/jobs")[0] == 404
    assert "TIMEBELL_SECRET_KEY" not in pages.err.read_text()
    assert pages.end() == 0
    assert "Traceback" not in pages.err.read_text()


def test_dev_without_an_app_runs_the_demo(start: Start, tmp_path: Path) -> None:
    process = start("dev", "--port", free_port())
    process.wait_for("built-in demo", err=True)
    process.wait_for(r"demo\.hello .* ok", times=1)
    schedule(f"sqlite:///{tmp_path}/timebell.db", "anything.you-like")
    process.wait_for(r"anything\.you-like .* ok")
    assert process.end(signal.SIGINT) == 0
    # `dev` needs no secret key: it creates one beside the database, readable by its owner only.
    key_file = tmp_path / "timebell.db.key"
    assert (key_file.stat().st_mode & 0o777, len(key_file.read_text())) == (0o600, 64)


UNAWAITED = """
from timebell import Timebell
app = Timebell(timezone="Asia/Seoul")

@app.on("plain.work")
def plain(event):
    app.schedule_at("bad.work")
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_call_without_await_is_logged_with_the_fix(start: Start, tmp_path: Path, log_format: str) -> None:
    (tmp_path / "my.py").write_text(UNAWAITED)
    process = start("dev", "my.py", "--port", free_port(), TIMEBELL_LOG_FORMAT=log_format)
    process.wait_for("Ready in", err=True)
    schedule(f"sqlite:///{tmp_path}/timebell.db", "plain.work")
    beginning = r"^\d\d:\d\d:\d\d KST WARNING .*" if log_format == "text" else ""
    process.wait_for(beginning + r"my\.py:7: RuntimeWarning: .*schedule_at' was never awaited", err=True)
    process.wait_for(r"NOT_AWAITED: .* or app\.sync\.schedule_at\(\.\.\.\) in a plain function", err=True)
    process.end()


def test_retries_and_failures_are_printed(start: Start, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(APP.replace("WORD", "1"))
    process = start("dev", "my.py", "--port", free_port())
    process.wait_for("Ready in", err=True)
    schedule(f"sqlite:///{tmp_path}/timebell.db", "bad.work")
    process.wait_for(r"bad\.work +\d.* failed: ValueError: as expected \(my\.py:\d+ in bad\)")
    process.wait_for(r"bad\.work \(attempt 2\) .* failed: ValueError")
    process.wait_for(r"^    Traceback \(most recent call last\)", times=2)
    process.wait_for(r'^ +File ".*my\.py", line \d+, in bad')
    assert not [line for line in process.out.read_text().splitlines() if "targets/handler.py" in line]
    schedule(f"sqlite:///{tmp_path}/timebell.db", "bad.wrk")
    process.wait_for(r"no live node handles their topic: bad\.wrk \(did you mean bad\.work\?\)", err=True)
    process.end()


def test_dev_sends_push_messages(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeFcm() as fcm:
        environment = {
            "TIMEBELL_FCM_CREDENTIALS": fcm.credentials, "TIMEBELL_FCM_URL": fcm.url, "SSL_CERT_FILE": fcm.ca,
        }  # fmt: skip
        for name, text in environment.items():
            monkeypatch.setenv(name, text)
        port = free_port()
        process = start("dev", "--port", port, **environment)
        process.wait_for("Ready in", err=True)
        target = {"kind": "push", "tokens": ["phone-of-ann"], "title": "Hello"}
        schedule(f"sqlite:///{tmp_path}/timebell.db", "push.hello", target=target)
        process.wait_for(r"push\.hello .* ok")
        post(port, "/devices", {"token": "phone-of-bob"})
        post(port, "/campaigns", {"title": "Good morning", "body": "Coffee?"})
        accepted = 'timebell_campaign_messages_total{state="accepted"} 1.0'
        until(lambda: True if accepted in get(port, "/metrics")[1] else None, process.out.read_text)
        assert process.end() == 0
        assert "phone-of-ann" in fcm.bodies()


def test_changed_code_restarts_dev_unless_it_does_not_compile(start: Start, tmp_path: Path) -> None:
    app = tmp_path / "my.py"

    def write_app(code: str) -> None:  # atomically, because a partly written file would be different code
        (tmp_path / "new").write_text(code)
        (tmp_path / "new").replace(app)

    write_app(APP.replace("WORD", "print('first', flush=True)"))
    process = start("dev", "my.py", "--port", free_port())
    process.wait_for("first")
    write_app("def broken(:")
    process.wait_for(r"my\.py does not compile; still running the old code", err=True)
    write_app(APP.replace("WORD", "print('second', flush=True)"))
    process.wait_for(r"my\.py changed: restarting", err=True)
    process.wait_for("second")
    process.wait_for("Ready in", err=True, times=2)
    assert process.end() == 0


def test_port_in_use_is_reported(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start("dev", "--port", taken.getsockname()[1])
        assert process.wait() == 5
    process.wait_for("code: PORT_IN_USE", err=True)
    process.wait_for("--port", err=True)


def test_metrics_port_in_use_is_reported_with_its_setting(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start("dev", "--port", free_port(), TIMEBELL_METRICS_PORT=str(port))
        assert process.wait() == 5
    process.wait_for(f"Port {port} .*is in use", err=True)
    process.wait_for("another port with TIMEBELL_METRICS_PORT, such as", err=True)


def test_doctor_accepts_a_port_at_which_timebell_answers(start: Start) -> None:
    port = free_port()
    start("dev", "--port", port).wait_for("Ready in", err=True)
    start("doctor", TIMEBELL_HTTP_PORT=str(port)).wait_for(rf"ok    port        Timebell answers at 127.0.0.1:{port}")


def test_second_engine_on_a_sqlite_file_is_refused(start: Start) -> None:
    first = start("dev", "--port", free_port())
    first.wait_for("Ready in", err=True)
    second = start("run", "--port", free_port())
    assert second.wait() == 5
    second.wait_for("code: SQLITE_IN_USE", err=True)
    assert first.end() == 0


def test_run_refuses_a_database_that_is_not_upgraded(start: Start, postgres: Postgres) -> None:
    url = postgres.create_database()
    try:
        process = start("run", "--port", free_port(), TIMEBELL_DATABASE_URL=url)
        assert process.wait() == 1
        process.wait_for("timebell db upgrade", err=True)
        process.wait_for("code: DATABASE_NOT_UPGRADED", err=True)
    finally:
        postgres.drop_database(url)


def test_run_until_idle_runs_what_is_due(start: Start, store_url: str, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(APP.replace('every="PT1S"', 'every="P1D"'))
    id_ = schedule(store_url, "slow.work")
    until(lambda: True if job_of(store_url, id_).run_at <= system_now() else None, lambda: "the job to be due")
    process = start("run", "my.py", "--until-idle", "--roles", "planner,worker", TIMEBELL_DATABASE_URL=store_url)
    assert process.wait() == 0
    assert job_of(store_url, id_).state == "completed"
    assert "dashboard http" not in process.err.read_text()


def test_sigterm_lets_running_jobs_finish(start: Start, store_url: str, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(APP.replace('every="PT1S"', 'every="P1D"'))
    process = start("run", "my.py", "--port", free_port(), TIMEBELL_DATABASE_URL=store_url)
    process.wait_for("Ready in", err=True)
    id_ = schedule(store_url, "slow.work")
    process.wait_for("slow begins")
    assert process.end() == 0
    assert (tmp_path / "slow-ended").exists()
    assert job_of(store_url, id_).state == "completed"


def test_a_request_in_flight_is_answered_after_the_drain(start: Start, store_url: str) -> None:
    """The rest of the request arrives after the listener was closed, when no engine runs anymore."""
    port = free_port()
    process = start("dev", QUICKSTART, "--port", port, "--no-reload", TIMEBELL_DATABASE_URL=store_url)
    process.wait_for("Ready in", err=True)
    body = b'{"topic": "t", "timezone": "UTC", "runAt": "2040-01-01T00:00:00Z"}'
    with socket.create_connection(("127.0.0.1", port), timeout=30) as request:
        request.sendall(
            f"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
            "Content-Type: application/json\r\nExpect: 100-continue\r\n\r\n".encode()
        )
        assert request.recv(1000).startswith(b"HTTP/1.1 100")  # sent when the server reads the body
        process.popen.send_signal(signal.SIGTERM)
        until(lambda: None if _is_listening(port) else True, lambda: "the server still listens")
        request.sendall(body)
        answer = request.recv(10_000)
    assert answer.startswith(b"HTTP/1.1 201"), (answer, process.err.read_text())
    assert process.wait() == 0
    assert "Error" not in process.err.read_text()


def test_the_store_is_closed_after_the_http_servers(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app, listening = Timebell(sqlite_url), []
    app.settings = dataclasses.replace(app.settings, http_port=free_port())
    close = app.close

    async def observe_close() -> None:
        listening.append(_is_listening(app.settings.http_port))
        await close()

    monkeypatch.setattr(app, "close", observe_close)
    asyncio.run(serve._run_engine(app, ("planner", "worker", "api"), until_idle=True))
    assert listening == [False]


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_logs_of_run_are_json_without_a_terminal(start: Start, sqlite_url: str) -> None:
    process = start("run", "--port", free_port(), TIMEBELL_DATABASE_URL=sqlite_url)
    process.wait_for("Ready in", err=True)
    assert process.end() == 0
    records = [json.loads(line) for line in process.err.read_text().splitlines()]
    for record in records:
        assert {"at", "level", "logger", "message"} <= set(record)
        assert "Ctrl-C" not in record["message"]
    assert records[0]["message"].startswith("TIMEBELL_SECRET_KEY is not set: ")


@pytest.mark.parametrize("roles", ["planner,baker", "worker,"])
def test_invalid_roles_are_refused(roles: str, start: Start) -> None:
    process = start("run", "--roles", roles)
    assert process.wait() == 2
    process.wait_for("error: ", err=True)


def test_roles_select_the_routes_that_are_served(start: Start) -> None:
    port = free_port()
    process = start("run", "--roles", "planner,worker,api", "--port", port)
    process.wait_for("Ready in", err=True)
    assert get(port, "/livez")[0] == 200
    assert get(port, "/")[0] == 404
    assert process.end() == 0


def test_an_imported_crontab_runs_its_commands(start: Start, tmp_path: Path) -> None:
    """From the crontab file to the effect of the command."""
    (tmp_path / "mine").write_text('* * * * * cat > "$OUT"%it ran\n'.replace("$OUT", str(tmp_path / "out")))
    on = {"TIMEBELL_COMMAND_ENABLED": "true"}
    done = start("import", "crontab", "mine", "--timezone", "UTC", **on)
    assert done.wait() == 0
    url = f"sqlite:///{tmp_path}/timebell.db"
    asyncio.run(_make_due(url))
    process = start("run", "--port", free_port(), **on)
    out = tmp_path / "out"
    # The next minute may begin and run the command again: only the first content counts.
    assert until(lambda: (out.exists() and out.read_text()) or None, process.err.read_text) == "it ran\n"
    assert process.end() == 0


async def _make_due(url: str) -> None:
    """Set every schedule's cursor to a few seconds ago, so that the test need not wait for the full minute."""
    from sqlalchemy import update

    from timebell.store.schema import schedules
    from timebell.store.transaction import Transaction

    def move(tx: Transaction) -> None:
        tx.execute(update(schedules).values(next_fire_at=system_now().replace(second=0, microsecond=0)))

    app = Timebell(url)
    await app.open()
    await app.store.run(move)
    await app.close()


def test_second_ctrl_c_ends_the_process_immediately(start: Start, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(APP.replace("WORD", "1").replace("sleep(1)", "sleep(60)"))
    port = free_port()
    process = start("dev", "my.py", "--port", port)
    process.wait_for("Ready in", err=True)
    schedule(f"sqlite:///{tmp_path}/timebell.db", "slow.work")
    process.wait_for("slow begins")
    process.popen.send_signal(signal.SIGINT)
    until(lambda: True if get(port, "/readyz")[0] == 503 else None, lambda: "the drain to begin")
    assert get(port, "/livez")[0] == 200
    assert process.end(signal.SIGINT) == 130
    assert "Traceback" not in process.err.read_text()


def test_sigterm_answers_the_last_request_before_the_store_closes(start: Start, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(APP.replace("WORD", "1"))
    port = free_port()
    process = start("dev", "my.py", "--port", port)
    process.wait_for("Ready in", err=True)
    body = json.dumps({"topic": "slow.work", "runAt": "2090-01-01T00:00:00Z"}).encode()
    head = "POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body[:5])
        process.popen.send_signal(signal.SIGTERM)
        until(lambda: True if not is_listening(port) else None, lambda: "the server to stop listening")
        client.sendall(body[5:])
        answer = b"".join(iter(lambda: client.recv(65_536), b""))
    assert answer.startswith(b"HTTP/1.1 201 "), answer
    assert process.wait() == 0
    assert "Traceback" not in process.err.read_text()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
