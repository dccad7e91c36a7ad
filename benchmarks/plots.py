"""SVG charts: bars for throughput, spans on a logarithmic scale for lags.

The colors follow the light or dark theme of the reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10

WIDTH, LABEL_WIDTH, FIGURE_WIDTH, ROW_HEIGHT, TITLE_HEIGHT = 800, 250, 170, 24, 36
PLOT_WIDTH = WIDTH - LABEL_WIDTH - FIGURE_WIDTH
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2328}.h{font-weight:600}.s{fill:#656d76;font-size:11px}"
    ".o{fill:#0969da}.p{fill:#8c959f}.l{stroke:#d0d7de}line.o{stroke:#0969da}line.p{stroke:#8c959f}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9198a1}.o{fill:#4493f8}line.o{stroke:#4493f8}"
    ".l{stroke:#3d444d}}"
)

Bar = tuple[str, float, bool]
"""Label, value, and whether it is Timebell."""
Span = tuple[str, float, float, bool]
"""Label, p50, p99, and whether it is Timebell."""


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Return a chart with one bar per row, on a scale from zero."""
    maximum = max(value for _, value, _ in rows)
    elements = []
    for at, (name, value, is_timebell) in enumerate(rows):
        y, width = TITLE_HEIGHT + at * ROW_HEIGHT, max(1.0, PLOT_WIDTH * value / maximum)
        elements.append(_label(name, y))
        elements.append(
            f'<rect class="{_css_class(is_timebell)}" x="{LABEL_WIDTH}" y="{y + 4}" width="{width:.1f}"'
            f' height="{ROW_HEIGHT - 8}"/>'
        )
        elements.append(f'<text x="{LABEL_WIDTH + width + 6:.1f}" y="{y + 16}">{value:,.0f}</text>')
    return _svg(title, TITLE_HEIGHT + len(rows) * ROW_HEIGHT + 8, elements)


def spans(title: str, rows: Sequence[Span]) -> str:
    """Return a chart with one span per row from p50 to p99 in milliseconds, on a logarithmic scale."""
    lowest = floor(log10(max(0.01, min(low for _, low, _, _ in rows))))
    highest = max(lowest + 1, ceil(log10(max(0.01, *(high for _, _, high, _ in rows)))))

    def x(value: float) -> float:
        return LABEL_WIDTH + PLOT_WIDTH * (log10(max(value, 10**lowest)) - lowest) / (highest - lowest)

    bottom, elements = TITLE_HEIGHT + len(rows) * ROW_HEIGHT, []
    for power in range(lowest, highest + 1):
        tick = x(10**power)
        elements.append(f'<line class="l" x1="{tick:.1f}" y1="{TITLE_HEIGHT}" x2="{tick:.1f}" y2="{bottom}"/>')
        elements.append(
            f'<text class="s" x="{tick:.1f}" y="{bottom + 14}" text-anchor="middle">{10.0**power:g} ms</text>'
        )
    for at, (name, low, high, is_timebell) in enumerate(rows):
        y, kind = TITLE_HEIGHT + at * ROW_HEIGHT + 12, _css_class(is_timebell)
        elements.append(_label(name, y - 12))
        elements.append(
            f'<line class="{kind}" x1="{x(low):.1f}" y1="{y}" x2="{x(high):.1f}" y2="{y}" stroke-width="4"/>'
        )
        elements += [f'<circle class="{kind}" cx="{x(value):.1f}" cy="{y}" r="5"/>' for value in (low, high)]
        elements.append(f'<text x="{WIDTH - FIGURE_WIDTH + 20}" y="{y + 4}">{_ms(low)} / {_ms(high)}</text>')
    return _svg(title, bottom + 24, elements)


def _svg(title: str, height: int, elements: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    metadata = f"<title>{escape(title)}</title><style>{STYLE}</style>"
    return "\n".join([head, metadata, f'<text class="h" x="0" y="16">{escape(title)}</text>', *elements, "</svg>", ""])


def _label(name: str, y: int) -> str:
    return f'<text x="{LABEL_WIDTH - 8}" y="{y + 16}" text-anchor="end">{escape(name)}</text>'


def _css_class(is_timebell: bool) -> str:
    return "o" if is_timebell else "p"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
