"""Metrics as text: Prometheus' format 0.0.4, or OpenMetrics 1.0 for who asks for it."""

from __future__ import annotations

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
    types = {one.partition(";")[0].strip() for one in accept.split(",")}
    if "application/openmetrics-text" not in types:
        return "".join(f"{line}\n" for family in families for line in _lines(family, family.name)), PLAIN
    lines = (line for family in families for line in _lines(family, family.name.removesuffix("_total")))
    return "".join(f"{line}\n" for line in (*lines, "# EOF")), OPEN


def _lines(family: Family, name: str) -> Iterator[str]:
    """`name` is what the metric is called in its first lines: OpenMetrics has counters there without `_total`."""
    told = family.help.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {name} {told}"
    yield f"# TYPE {name} {family.kind}"
    for labels, value, suffix in family.samples:
        within = ",".join(f'{label}="{_escaped(word)}"' for label, word in labels)
        yield f"{family.name}{suffix}{f'{{{within}}}' if within else ''} {float(value)!r}"


def _escaped(word: str) -> str:
    return word.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
