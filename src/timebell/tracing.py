"""Traces by OpenTelemetry: a span for what makes jobs, one for each delivery, and a link from the second to the first.

Names are those of the semantic conventions for messaging (https://opentelemetry.io/docs/specs/semconv/messaging/),
which are not stable yet: all of them are in this file. A delivery is a trace of its own, as days may lie between it and
what made the job; it is linked to that. The maker's context is kept with the job, in its metadata, as `traceparent`
(https://www.w3.org/TR/trace-context/).

No attribute holds a payload, a header, an address or the text of an error. Off, and nothing is imported, until `start`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from timebell.errors import Refused

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

TRACEPARENT = "traceparent"
SYSTEM = "timebell"
_FORM = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_KEPT = re.compile(rf'"{TRACEPARENT}":"{_FORM.pattern}",?|,"{TRACEPARENT}":"{_FORM.pattern}"(?=}})')
_tracer: Tracer | None = None


def start(version: str) -> None:
    """Trace from now on, to the provider that the application has set, else over OTLP as the OTEL_* variables say.

    Raises Refused (EXTRA_MISSING).
    """
    global _tracer  # noqa: PLW0603 - OpenTelemetry's own provider is one a process, too
    if _tracer is not None:
        return
    try:
        from opentelemetry import trace

        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            trace.set_tracer_provider(_exporting())
    except ImportError as missing:
        raise Refused(
            f"Traces need the package {missing.name}, which is not installed.", code="EXTRA_MISSING",
            fix='Run: pip install "timebell[otel]", or unset TIMEBELL_OTEL_ENABLED.',
        ) from missing  # fmt: skip
    _tracer = trace.get_tracer("timebell", version)


def _exporting() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = Resource({SERVICE_NAME: SYSTEM}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def stop() -> None:
    """Trace no more in this process."""
    global _tracer  # noqa: PLW0603 - as in start
    _tracer = None


def on() -> bool:
    """Whether anything is traced."""
    return _tracer is not None


def creating(topics: Iterable[str], ids: list[str]) -> AbstractContextManager[Any]:
    """While jobs with these ids are made, or a schedule, which has none: they keep this context."""
    if _tracer is None:
        return nullcontext()
    from opentelemetry.trace import SpanKind

    topic, *others = sorted(set(topics)) or ["?"]
    name = topic if not others else "(several)"
    said = {**_said("create", "create" if len(ids) < 2 else "send"), "messaging.destination.name": name}
    if len(ids) == 1:
        said["messaging.message.id"] = ids[0]
    elif ids:
        said["messaging.batch.message_count"] = len(ids)
    return _tracer.start_as_current_span(
        f"create {name}", kind=SpanKind.PRODUCER, attributes=said, record_exception=False
    )  # fmt: skip


def context_to_keep() -> dict[str, str]:
    """What a job or schedule that is made now keeps of its maker: its `traceparent`, if anything is traced."""
    if _tracer is None:
        return {}
    from opentelemetry import trace

    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {TRACEPARENT: f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}


def trace_id() -> str | None:
    """Of what is traced here and now, as logs tell it."""
    kept = context_to_keep()
    return kept[TRACEPARENT].split("-")[1] if kept else None


def without_context(text: str) -> str:
    """JSON of an action without the context of whoever made it, which is no part of what it does."""
    return _KEPT.sub("", text) if TRACEPARENT in text else text


class Delivering:
    """The span of a delivery; `trace_id` is told in logs."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self.trace_id = f"{span.get_span_context().trace_id:032x}"

    def ended(self, code: str | None, *, delivered: bool) -> None:
        """What it came to: `code` is the stable one, never a text."""
        from opentelemetry.trace import StatusCode

        if delivered:
            self._span.set_status(StatusCode.OK)
        else:
            self._span.set_attribute("error.type", code or "FAILED")
            self._span.set_status(StatusCode.ERROR)


@contextmanager
def delivering(
    kind: str, topic: str, job_id: str, metadata: Mapping[str, Any], known: Mapping[str, str | int | float | None]
) -> Iterator[Delivering | None]:
    """While an attempt is delivered to a target of this kind. `known` are more attributes, `timebell.` before them."""
    if _tracer is None:
        yield None
        return
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind

    here = kind == "handler"
    verb = "process" if here else "send"
    said = {
        **_said(verb, verb), "messaging.destination.name": topic, "messaging.message.id": job_id,
        "timebell.target": kind, **{f"timebell.{name}": value for name, value in known.items() if value is not None},
    }  # fmt: skip
    with _tracer.start_as_current_span(
        f"{verb} {topic}", context=Context(), kind=SpanKind.CONSUMER if here else SpanKind.PRODUCER, attributes=said,
        links=_links(metadata.get(TRACEPARENT)), record_exception=False, set_status_on_exception=False,
    ) as span:  # fmt: skip
        yield Delivering(span)


def outgoing() -> dict[str, str]:
    """The header that tells a receiver which delivery this is; none unless something is traced."""
    return context_to_keep()


@contextmanager
def incoming(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[None]:
    """While a request is answered: what it makes belongs to the trace of its sender."""
    found = [] if _tracer is None else [value.decode("latin1") for name, value in headers if name == b"traceparent"]
    given = found[0] if found else ""
    if not _FORM.fullmatch(given):
        yield
        return
    from opentelemetry import context, trace

    token = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(_read(given))))
    try:
        yield
    finally:
        context.detach(token)


def _links(traceparent: Any) -> list[Any]:
    from opentelemetry.trace import Link

    if not isinstance(traceparent, str) or not _FORM.fullmatch(traceparent):
        return []
    context = _read(traceparent)
    return [Link(context)] if context.is_valid else []


def _read(traceparent: str) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags

    _, trace_id, span_id, flags = traceparent.split("-")
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))


def _said(name: str, kind: str) -> dict[str, Any]:
    return {"messaging.system": SYSTEM, "messaging.operation.name": name, "messaging.operation.type": kind}
