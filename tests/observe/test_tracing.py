"""Tracing: one span per delivery, linked to the span that created its job, without secrets; off by default."""

from __future__ import annotations

import asyncio
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.unit.cli.conftest import Start, start
from tests.unit.cli.process import until
from timebell import Arrived, Every, Timebell, tracing
from timebell.errors import Refused

__all__ = ["start"]

SECRETS = ("hunter2-payload", "hunter2-header", "hunter2-query", "hunter2-error")


@pytest.fixture(scope="module")
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    yield exporter
    provider.shutdown()


@pytest.fixture
def traced(spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    monkeypatch.setenv("TIMEBELL_OTEL_ENABLED", "true")
    spans.clear()
    yield spans
    tracing.stop()


def spans_named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


async def ended(app: Timebell, *ids: str) -> None:
    async with asyncio.timeout(60):
        for id_ in ids:
            while (await app.get(id_)).state in ("pending", "running"):
                await asyncio.sleep(0.02)


def test_a_delivery_span_is_linked_to_the_span_that_created_its_job(
    store_url: str, traced: InMemorySpanExporter
) -> None:
    app = Timebell(store_url, timezone="UTC")
    seen: list[Any] = []

    @app.on("mail.send", retry={"attempts": 2, "delay": 0.05})
    def plain(event: Arrived) -> None:
        seen.append((event.metadata, trace.get_current_span().get_span_context()))
        if event.attempt == 1:
            raise ValueError("hunter2-error")

    async def scene() -> str:
        mine = trace.get_tracer("test").start_as_current_span("request")
        with mine as request:
            job = await app.schedule_at("mail.send", payload={"password": "hunter2-payload"}, metadata={"k": "v"})
            await app.schedule_many([])
        async with app.running():
            await ended(app, job.id)
        await app.close()
        (created,) = spans_named(traced, "create mail.send")
        assert created.parent is not None and created.parent.span_id == request.get_span_context().span_id
        return job.id

    job_id = asyncio.run(scene())
    (created,) = spans_named(traced, "create mail.send")
    first, second = spans_named(traced, "process mail.send")
    for number, span in enumerate((first, second), 1):
        (link,) = span.links
        assert (link.context.trace_id, link.context.span_id) == (created.context.trace_id, created.context.span_id)
        assert (span.parent, span.kind) == (None, SpanKind.CONSUMER)
        attributes = dict(span.attributes or {})
        assert attributes["timebell.attempt"] == number
        assert (attributes["messaging.system"], attributes["messaging.operation.type"]) == ("timebell", "process")
        assert (attributes["messaging.destination.name"], attributes["messaging.message.id"]) == ("mail.send", job_id)
        assert (attributes["timebell.tenant"], attributes["timebell.target"]) == ("default", "handler")
    assert (first.status.status_code, (first.attributes or {})["error.type"]) == (StatusCode.ERROR, "ValueError")
    assert second.status.status_code is StatusCode.OK
    assert first.context.trace_id != second.context.trace_id
    assert [context.span_id for _, context in seen] == [first.context.span_id, second.context.span_id]
    assert all(metadata["k"] == "v" for metadata, _ in seen)
    exported_text = "".join(span.to_json() for span in traced.get_finished_spans())
    assert not any(secret in exported_text for secret in SECRETS)


def test_a_firing_is_linked_to_its_schedule_and_saving_it_again_is_no_edit(
    sqlite_url: str, traced: InMemorySpanExporter
) -> None:
    app = Timebell(sqlite_url, timezone="UTC")
    fired = asyncio.Event()

    @app.on("tick")
    async def tick(event: Arrived) -> None:
        fired.set()

    async def scene() -> None:
        saved = await app.schedule_repeat("tick", Every("PT1S"), name="t")
        again = await app.schedule_repeat("tick", Every("PT1S"), name="t", replace=True)
        assert (saved.revision, again.revision) == (1, 1)
        async with app.running():
            async with asyncio.timeout(60):
                await fired.wait()
                while not spans_named(traced, "process tick"):
                    await asyncio.sleep(0.02)
        await app.close()

    asyncio.run(scene())
    first = spans_named(traced, "create tick")[0]
    assert {link.context.span_id for span in spans_named(traced, "process tick") for link in span.links} == {
        first.context.span_id
    }
    assert (spans_named(traced, "process tick")[0].attributes or {})["timebell.schedule"] == "t"


class Sink(http.server.BaseHTTPRequestHandler):
    """Answer every POST with 200 and record it."""

    got: list[tuple[str, dict[str, str], bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.got.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Suppress the log."""


@pytest.fixture
def sink() -> Iterator[tuple[int, list[tuple[str, dict[str, str], bytes]]]]:
    got: list[tuple[str, dict[str, str], bytes]] = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Sink,), {"got": got}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1], got
    server.shutdown()
    server.server_close()


APP = """
from timebell import Timebell
app = Timebell(timezone="UTC")

@app.on("local")
async def local(event):
    raise RuntimeError("hunter2-error")
"""


def test_a_node_exports_over_otlp_without_secrets(
    start: Start, sink: tuple[int, list[tuple[str, dict[str, str], bytes]]], tmp_path: Path, sqlite_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    port, got = sink
    (tmp_path / "app.py").write_text(APP)
    environment = {
        "TIMEBELL_OTEL_ENABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_BSP_SCHEDULE_DELAY": "200", "OTEL_SERVICE_NAME": "reminders", "TIMEBELL_DATABASE_URL": sqlite_url,
        "TIMEBELL_WEBHOOK_ALLOW_PRIVATE": "true",
        "TIMEBELL_WEBHOOK_SIGNING_SECRET": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "TIMEBELL_LOG_FORMAT": "json",
    }  # fmt: skip

    async def make() -> None:
        app = Timebell(sqlite_url, timezone="UTC")
        hook = {"kind": "http", "url": f"http://127.0.0.1:{port}/hook?key=hunter2-query",
                "headers": {"x-key": "hunter2-header"}}  # fmt: skip
        for target in (hook, None):
            await app.schedule_at("hooked" if target else "local", target=target, payload={"p": "hunter2-payload"},
                                  retry={"attempts": 1})  # fmt: skip
        await app.close()

    for name in ("TIMEBELL_WEBHOOK_ALLOW_PRIVATE", "TIMEBELL_WEBHOOK_SIGNING_SECRET"):
        monkeypatch.setenv(name, environment[name])
    asyncio.run(make())
    node = start("run", "app.py", "--roles", "planner,worker", **environment)

    def exported() -> set[str] | None:
        names = {
            span.name
            for path, _, body in list(got) if path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans for span in scope.spans
        }  # fmt: skip
        return names if names >= {"send hooked", "process local"} else None

    until(exported, node.err.read_text)
    sent = [headers for path, headers, _ in got if path.startswith("/hook")]
    assert sent[0]["traceparent"].startswith("00-")
    traces = b"".join(body for path, _, body in got if path == "/v1/traces")
    assert b"reminders" in traces
    assert not any(secret.encode() in traces for secret in SECRETS)
    node.wait_for("job.dead", err=True)
    (dead,) = [json.loads(line) for line in node.err.read_text().splitlines() if '"job.dead"' in line]
    assert bytes.fromhex(dead["trace_id"]) in traces


def test_opentelemetry_is_not_imported_by_default() -> None:
    program = "import sys, timebell; timebell.Timebell('sqlite:///x.db'); print('opentelemetry' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"


def test_a_missing_extra_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIMEBELL_OTEL_ENABLED", "true")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(Refused, match="not installed") as refused:
        Timebell("sqlite:///x.db")
    assert (refused.value.code, "timebell[otel]" in (refused.value.fix or "")) == ("EXTRA_MISSING", True)
