"""OpenTelemetry traces: a span for the creation of jobs, and a linked span for each delivery.

Names follow the semantic conventions for messaging (https://opentelemetry.io/docs/specs/semconv/messaging/), which are
not stable yet; all of them are in this file. A delivery is a separate trace, because it may follow the creation by
days; it has a link to the creation span. The creator's context is stored in the metadata of the job as `traceparent`
(https://www.w3.org/TR/trace-context/).

No attribute contains a payload, a header, an address or the text of an error. Tracing is off, and OpenTelemetry is not
imported, until `start`.
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
MESSAGING_SYSTEM = "timebell"
_TRACEPARENT_PATTERN = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_STORED_TRACEPARENT = re.compile(
    rf'"{TRACEPARENT}":"{_TRACEPARENT_PATTERN.pattern}",?|,"{TRACEPARENT}":"{_TRACEPARENT_PATTERN.pattern}"(?=}})'
)
_tracer: Tracer | None = None


def start(version: str) -> None:
    """Start tracing, with the application's tracer provider or an OTLP exporter configured by the OTEL_* variables.

    Raises Refused (EXTRA_MISSING).
    """
    global _tracer  # noqa: PLW0603 - OpenTelemetry's own provider is process-wide, too
    if _tracer is not None:
        return
    try:
        from opentelemetry import trace

        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            trace.set_tracer_provider(_otlp_provider())
    except ImportError as error:
        raise Refused(
            f"Traces need the package {error.name}, which is not installed.", code="EXTRA_MISSING",
            fix='Run: pip install "timebell[otel]", or unset TIMEBELL_OTEL_ENABLED.',
        ) from error  # fmt: skip
    _tracer = trace.get_tracer("timebell", version)


def _otlp_provider() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource({SERVICE_NAME: MESSAGING_SYSTEM}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def stop() -> None:
    """Stop tracing in this process."""
    global _tracer  # noqa: PLW0603
    _tracer = None


def is_enabled() -> bool:
    """Return whether tracing is on."""
    return _tracer is not None


def creation_span(topics: Iterable[str], ids: list[str]) -> AbstractContextManager[Any]:
    """Open a span for the creation of jobs with these ids (empty for a schedule), which store its context."""
    if _tracer is None:
        return nullcontext()
    from opentelemetry.trace import SpanKind

    topic, *others = sorted(set(topics)) or ["?"]
    name = topic if not others else "(several)"
    attributes = _operation_attributes("create", "create" if len(ids) < 2 else "send")
    attributes["messaging.destination.name"] = name
    if len(ids) == 1:
        attributes["messaging.message.id"] = ids[0]
    elif ids:
        attributes["messaging.batch.message_count"] = len(ids)
    return _tracer.start_as_current_span(
        f"create {name}", kind=SpanKind.PRODUCER, attributes=attributes, record_exception=False
    )  # fmt: skip


def current_context() -> dict[str, str]:
    """Return the current `traceparent` to store with a new job or schedule; empty if there is no trace."""
    if _tracer is None:
        return {}
    from opentelemetry import trace

    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {TRACEPARENT: f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}


def current_trace_id() -> str | None:
    """Return the current trace id, for logs; None if there is no trace."""
    context = current_context()
    return context[TRACEPARENT].split("-")[1] if context else None


def strip_context(text: str) -> str:
    """Remove the creator's context from the JSON of an action, so that it does not affect comparisons."""
    return _STORED_TRACEPARENT.sub("", text) if TRACEPARENT in text else text


class DeliverySpan:
    """The span of a delivery; `trace_id` appears in logs."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self.trace_id = f"{span.get_span_context().trace_id:032x}"

    def record_outcome(self, code: str | None, *, delivered: bool) -> None:
        """Record the outcome; `code` is the stable error code, never a message."""
        from opentelemetry.trace import StatusCode

        if delivered:
            self._span.set_status(StatusCode.OK)
        else:
            self._span.set_attribute("error.type", code or "FAILED")
            self._span.set_status(StatusCode.ERROR)


@contextmanager
def delivery_span(
    kind: str, topic: str, job_id: str, metadata: Mapping[str, Any], attributes: Mapping[str, str | int | float | None]
) -> Iterator[DeliverySpan | None]:
    """Open a span for the delivery of an attempt to a target of this kind; yields None if tracing is off.

    `attributes` are added with the prefix `timebell.`, except those that are None.
    """
    if _tracer is None:
        yield None
        return
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind

    is_handler = kind == "handler"
    operation = "process" if is_handler else "send"
    span_attributes = {
        **_operation_attributes(operation, operation), "messaging.destination.name": topic,
        "messaging.message.id": job_id, "timebell.target": kind,
        **{f"timebell.{name}": value for name, value in attributes.items() if value is not None},
    }  # fmt: skip
    with _tracer.start_as_current_span(
        f"{operation} {topic}", context=Context(), kind=SpanKind.CONSUMER if is_handler else SpanKind.PRODUCER,
        attributes=span_attributes, links=_links(metadata.get(TRACEPARENT)), record_exception=False,
        set_status_on_exception=False,
    ) as span:  # fmt: skip
        yield DeliverySpan(span)


def outgoing_headers() -> dict[str, str]:
    """Return the `traceparent` header of a delivery; empty if there is no trace."""
    return current_context()


def incoming_trace(headers: Iterable[tuple[bytes, bytes]]) -> AbstractContextManager[None]:
    """Continue the trace of a request's sender while the request is handled."""
    values = [] if _tracer is None else [value.decode("latin1") for name, value in headers if name == b"traceparent"]
    traceparent = values[0] if values else ""
    return _attached(traceparent) if _TRACEPARENT_PATTERN.fullmatch(traceparent) else nullcontext()


@contextmanager
def _attached(traceparent: str) -> Iterator[None]:
    from opentelemetry import context, trace

    token = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(_parse_traceparent(traceparent))))
    try:
        yield
    finally:
        context.detach(token)


def _links(traceparent: Any) -> list[Any]:
    from opentelemetry.trace import Link

    if not isinstance(traceparent, str) or not _TRACEPARENT_PATTERN.fullmatch(traceparent):
        return []
    context = _parse_traceparent(traceparent)
    return [Link(context)] if context.is_valid else []


def _parse_traceparent(traceparent: str) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags

    _, trace_id, span_id, flags = traceparent.split("-")
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))


def _operation_attributes(name: str, kind: str) -> dict[str, Any]:
    return {"messaging.system": MESSAGING_SYSTEM, "messaging.operation.name": name, "messaging.operation.type": kind}
