"""Text formats of metrics: Prometheus 0.0.4, or OpenMetrics 1.0 if the client accepts it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]
PROMETHEUS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_MEDIA_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Sample(NamedTuple):
    """Value of a metric. `suffix` is appended to its name: `_bucket`, `_sum` or `_count` for histograms."""

    labels: Iterable[tuple[str, str]]
    value: float
    suffix: str = ""


class Family(NamedTuple):
    """Metric with its samples. Counter names end in `_total`."""

    name: str
    kind: Kind
    help: str
    samples: list[Sample]


def render(families: Iterable[Family], accept: str) -> tuple[str, str]:
    """Return the rendered metrics and their media type, chosen by the Accept header."""
    types = {part.partition(";")[0].strip().lower() for part in accept.split(",")}
    if "application/openmetrics-text" not in types:
        return "".join(
            f"{line}\n"
            for family in families
            for line in _render_family(family, family.name, _escape_help(family.help))
        ), PROMETHEUS_MEDIA_TYPE
    # OpenMetrics omits _total in the HELP and TYPE lines of counters and escapes quotes in help texts.
    lines = (
        line
        for family in families
        for line in _render_family(family, family.name.removesuffix("_total"), _escape_label(family.help))
    )
    return "".join(f"{line}\n" for line in (*lines, "# EOF")), OPENMETRICS_MEDIA_TYPE


def _render_family(family: Family, name: str, help_text: str) -> Iterator[str]:
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {family.kind}"
    for labels, value, suffix in family.samples:
        label_text = ",".join(f'{label}="{_escape_label(text)}"' for label, text in labels)
        yield f"{family.name}{suffix}{f'{{{label_text}}}' if label_text else ''} {_format_number(value)}"


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _escape_label(text: str) -> str:
    return _escape_help(text).replace('"', r"\"")


def _format_number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
