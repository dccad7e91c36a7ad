"""Pictures of figures, as SVG: a bar each for what is the more the better, a span each for lags, whose scale is
logarithmic. They follow the reader's light or dark background."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10

WIDTH, LABEL, FIGURE, ROW, HEAD = 800, 250, 170, 24, 36
ROOM = WIDTH - LABEL - FIGURE
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2328}.h{font-weight:600}.s{fill:#656d76;font-size:11px}"
    ".o{fill:#0969da}.p{fill:#8c959f}.l{stroke:#d0d7de}line.o{stroke:#0969da}line.p{stroke:#8c959f}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9198a1}.o{fill:#4493f8}line.o{stroke:#4493f8}"
    ".l{stroke:#3d444d}}"
)

Bar = tuple[str, float, bool]
"""What it is called, how much it is, and whether it is ours."""
Span = tuple[str, float, float, bool]
"""What it is called, its p50 and p99, and whether it is ours."""


def bars(title: str, rows: Sequence[Bar]) -> str:
    """One below the other, on a scale from zero."""
    most = max(value for _, value, _ in rows)
    drawn = []
    for at, (name, value, ours) in enumerate(rows):
        y, width = HEAD + at * ROW, max(1.0, ROOM * value / most)
        drawn.append(_label(name, y))
        drawn.append(f'<rect class="{_class(ours)}" x="{LABEL}" y="{y + 4}" width="{width:.1f}" height="{ROW - 8}"/>')
        drawn.append(f'<text x="{LABEL + width + 6:.1f}" y="{y + 16}">{value:,.0f}</text>')
    return _picture(title, HEAD + len(rows) * ROW + 8, drawn)


def spans(title: str, rows: Sequence[Span]) -> str:
    """From p50 to p99 in milliseconds, on a logarithmic scale."""
    least = floor(log10(max(0.01, min(low for _, low, _, _ in rows))))
    most = max(least + 1, ceil(log10(max(0.01, *(high for _, _, high, _ in rows)))))

    def x(value: float) -> float:
        return LABEL + ROOM * (log10(max(value, 10**least)) - least) / (most - least)

    bottom, drawn = HEAD + len(rows) * ROW, []
    for power in range(least, most + 1):
        at = x(10**power)
        drawn.append(f'<line class="l" x1="{at:.1f}" y1="{HEAD}" x2="{at:.1f}" y2="{bottom}"/>')
        drawn.append(f'<text class="s" x="{at:.1f}" y="{bottom + 14}" text-anchor="middle">{10.0**power:g} ms</text>')
    for place, (name, low, high, ours) in enumerate(rows):
        y, kind = HEAD + place * ROW + 12, _class(ours)
        drawn.append(_label(name, y - 12))
        drawn.append(f'<line class="{kind}" x1="{x(low):.1f}" y1="{y}" x2="{x(high):.1f}" y2="{y}" stroke-width="4"/>')
        drawn += [f'<circle class="{kind}" cx="{x(value):.1f}" cy="{y}" r="5"/>' for value in (low, high)]
        drawn.append(f'<text x="{WIDTH - FIGURE + 20}" y="{y + 4}">{_ms(low)} / {_ms(high)}</text>')
    return _picture(title, bottom + 24, drawn)


def _picture(title: str, height: int, drawn: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    named = f"<title>{escape(title)}</title><style>{STYLE}</style>"
    return "\n".join([head, named, f'<text class="h" x="0" y="16">{escape(title)}</text>', *drawn, "</svg>", ""])


def _label(name: str, y: int) -> str:
    return f'<text x="{LABEL - 8}" y="{y + 16}" text-anchor="end">{escape(name)}</text>'


def _class(ours: bool) -> str:
    return "o" if ours else "p"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
