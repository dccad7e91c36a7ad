"""DIR/report.html: the results of a run on one self-contained page."""

from __future__ import annotations

from html import escape
from typing import Any

from timebell_torture.history import History
from timebell_torture.plan import Plan
from timebell_torture.verdict import VIOLATION_CLASSES, Verdict

WIDTH_PIXELS, ROW_HEIGHT_PIXELS, LABEL_WIDTH_PIXELS = 1100, 7, 90
FAULT_COLORS = {
    "kill": "#d9534f", "point": "#b03060", "freeze": "#5b8def", "cut": "#8e6bbf", "client": "#c9b6e4",
    "dbstop": "#e8a33d", "churn": "#6ab187", "stall": "#999999", "starved": "#bbbbbb",
    "drop": "#6b4fa0", "clock": "#4fb3bf",
    "strand": "#8e44ad", "read-only": "#c0792a", "promote": "#27698d", "rewind": "#8d273c",
    "dbclock": "#1f7a8c", "diskfull": "#a0522d", "pool": "#d98cb3", "migrate": "#7f8c3d",
}  # fmt: skip
MAX_TIMELINE_ROWS = 80
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1200px;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;margin:.5rem 0 1.5rem}
td,th{padding:.2rem .8rem;border-bottom:1px solid #ddd;text-align:left}
td.n{text-align:right;font-variant-numeric:tabular-nums}.VALID{color:#287d3c}.INVALID{color:#b3261e}.UNKNOWN{color:#8a6100}
code{background:#f3f3f3;padding:.1rem .3rem}svg{width:100%;height:auto}.key span{margin-right:1rem;white-space:nowrap}
@media(prefers-color-scheme:dark){body{background:#16181c;color:#ddd}td,th{border-color:#333}code{background:#222}
.VALID{color:#6fcf8a}.INVALID{color:#ff8a80}.UNKNOWN{color:#e8c060}}
"""


def render_report(plan: Plan, history: History, verdict: Verdict, summary: dict[str, Any]) -> str:
    """Return the report as HTML."""
    state = summary["verdict"]
    counts = "".join(
        f"<tr><td>{name}</td><td class=n>{summary['failed'].get(name, 0)}</td></tr>" for name in VIOLATION_CLASSES
    )
    lateness_rows = "".join(
        f"<tr><td>{escape(phase)}</td><td class=n>{row['count']}</td>"
        + "".join(f"<td class=n>{row[name] * 1000:.0f} ms</td>" for name in ("p50", "p99", "p999", "max"))
        + "</tr>"
        for phase, row in summary["late"].items()
    )
    violation_rows = "".join(
        f"<tr><td>{escape(violation['name'])}</td><td>{escape(violation['label'])}</td>"
        f"<td class=n>{violation['at']:.3f}</td><td>{escape(violation['detail'])}</td></tr>"
        for violation in summary["violations"]
    )  # fmt: skip
    recovery_items = "".join(
        f"<li>{'attempts of a lost node taken over' if kind == 'node' else 'after the database returned'}:"
        f" {row['count']} times, at most {row['max']:g} s</li>" for kind, row in summary["recovery"].items()
    )  # fmt: skip
    legend = "".join(
        "<span><svg viewBox='0 0 10 10' style='width:.8em'>"
        f"<rect width=10 height=10 fill='{FAULT_COLORS[kind]}'/></svg> {kind} {count}</span>"
        for kind, count in summary["faults"].items()
    )  # fmt: skip
    shortfall_items = "".join(f"<li>{escape(violation)}</li>" for violation in summary["why"])
    expected = summary["expected"]
    return f"""<!doctype html><html lang=en><meta charset=utf-8><title>timebell torture: {state}</title>
<meta name=viewport content="width=device-width"><style>{STYLE}</style>
<h1>timebell torture: <span class={state}>{state}</span></h1>
<p>{plan.minutes:g} min on {escape(plan.store)}, {len(plan.nodes)} nodes, seed {plan.seed}.
{expected["must"]} occurrences had to fire, {expected["may"]} were optional, {expected["mustnot"]} were forbidden;
{summary["effects"]} attempts arrived, {summary["operations"]} operations were requested.
{summary["justified"]} repeated deliveries are explained by a fault.</p>
<p><code>{escape(summary["again"])}</code></p>
{f"<h2>Why the verdict is unknown</h2><ul>{shortfall_items}</ul>" if shortfall_items else ""}
<h2>Required occurrences</h2><p class=key>{legend}</p>{render_timeline(plan, history, verdict)}
<h2>Lateness</h2><table><tr><th>phase<th>starts<th>p50<th>p99<th>p99.9<th>max</tr>{lateness_rows}</table>
<ul>{recovery_items}</ul>
<h2>Violations</h2><table>{counts}</table>{f"<table>{violation_rows}</table>" if violation_rows else ""}</html>
"""


def render_timeline(plan: Plan, history: History, verdict: Verdict) -> str:
    """Return an SVG: due instants as bars, green if they fired and red if not, on bands of faults."""
    length = max(1.0, history.end)
    fault_rows = sorted({(fault.kind, fault.target) for fault in history.faults})
    failing = {label for label, _, fired in verdict.targets if not fired}
    labels = sorted({label for label, _, _ in verdict.targets if not label.startswith(("shot", "burst"))})
    labels = ["one-shots", *sorted(labels, key=lambda label: label not in failing)[: MAX_TIMELINE_ROWS - 1]]
    top = len(fault_rows) * ROW_HEIGHT_PIXELS * 2 + 10
    height = top + len(labels) * ROW_HEIGHT_PIXELS + 20

    def x(at: float) -> float:
        return LABEL_WIDTH_PIXELS + at / length * (WIDTH_PIXELS - LABEL_WIDTH_PIXELS)

    parts = [f"<svg viewBox='0 0 {WIDTH_PIXELS} {height}' role=img aria-label='Due instants and faults over time'>"]
    for fault in history.faults:
        color, y = FAULT_COLORS[fault.kind], fault_rows.index((fault.kind, fault.target)) * ROW_HEIGHT_PIXELS * 2
        width = max(1.0, x(fault.end) - x(fault.start))
        title = f"<title>{fault.kind} {escape(fault.target)} {fault.start:.1f}–{fault.end:.1f} s</title>"
        parts.append(
            f"<rect x={x(fault.start):.1f} y={y} width={width:.1f} height={ROW_HEIGHT_PIXELS * 2 - 2} fill='{color}'>"
            f"{title}</rect>"
        )
        parts.append(
            f"<rect x={x(fault.start):.1f} y={top} width={width:.1f} height={height - top - 20} fill='{color}'"
            " opacity=.13 />"
        )
    for kind, target in fault_rows:
        y = fault_rows.index((kind, target)) * ROW_HEIGHT_PIXELS * 2 + 10
        parts.append(f"<text x=0 y={y} font-size=10 fill=currentColor>{kind} {escape(target)}</text>")
    rows = {label: number for number, label in enumerate(labels)}
    for label, due, fired in verdict.targets:
        row = rows.get("one-shots" if label.startswith(("shot", "burst")) else label)
        if row is not None:
            color = "#3a9d5d" if fired else "#d62728"
            y = top + row * ROW_HEIGHT_PIXELS
            parts.append(f"<rect x={x(due):.1f} y={y} width=1.2 height={ROW_HEIGHT_PIXELS - 1} fill='{color}'/>")
    for label, row in rows.items():
        parts.append(
            f"<text x=0 y={top + row * ROW_HEIGHT_PIXELS + 6} font-size=6 fill=currentColor>{escape(label)}</text>"
        )
    for second in range(0, int(length) + 1, max(10, int(length / 12) // 10 * 10)):
        parts.append(f"<text x={x(second):.0f} y={height - 5} font-size=10 fill=currentColor>{second} s</text>")
    return "".join(parts) + "</svg>"
