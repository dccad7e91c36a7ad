"""Metrics as text: Prometheus' format 0.0.4, or OpenMetrics 1.0 for who asks for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPEN = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Sample(NamedTuple):
    """A value. `suffix` follows the name of the metric: `_bucket`, `_sum` and `_count` of histograms."""

    labels: Iterable[tuple[str, str]]
    value: float
    suffix: str = ""


class Family(NamedTuple):
    """A metric with its values. The name of a counter ends in `_total`."""

    name: str
    kind: Kind
    help: str
    samples: list[Sample]


def exposed(families: Iterable[Family], accept: str) -> tuple[str, str]:
    """All of them as text, and its media type, by what the reader accepts."""
    types = {one.partition(";")[0].strip().lower() for one in accept.split(",")}
    if "application/openmetrics-text" not in types:
        return "".join(f"{line}\n" for one in families for line in _lines(one, one.name, _plain(one.help))), PLAIN
    # There a counter is called without its _total in these two lines, and quotes are escaped in help, too.
    lines = (line for one in families for line in _lines(one, one.name.removesuffix("_total"), _escaped(one.help)))
    return "".join(f"{line}\n" for line in (*lines, "# EOF")), OPEN


def _lines(family: Family, name: str, told: str) -> Iterator[str]:
    yield f"# HELP {name} {told}"
    yield f"# TYPE {name} {family.kind}"
    for labels, value, suffix in family.samples:
        within = ",".join(f'{label}="{_escaped(word)}"' for label, word in labels)
        yield f"{family.name}{suffix}{f'{{{within}}}' if within else ''} {_number(value)}"


def _plain(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _escaped(text: str) -> str:
    return _plain(text).replace('"', r"\"")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
