"""DIR/report.html: what a run came to, on one page that needs nothing else."""

from __future__ import annotations

from html import escape
from typing import Any

from timebell.torture.history import History
from timebell.torture.plan import Plan
from timebell.torture.verdict import CLASSES, Verdict

WIDTH, ROW, LEFT = 1100, 7, 90
COLOURS = {
    "kill": "#d9534f", "point": "#b03060", "freeze": "#5b8def", "cut": "#8e6bbf", "client": "#c9b6e4",
    "dbstop": "#e8a33d", "churn": "#6ab187", "stall": "#999999", "starved": "#bbbbbb",
    "drop": "#6b4fa0", "clock": "#4fb3bf",
    "dbclock": "#1f7a8c", "diskfull": "#a0522d", "pool": "#d98cb3", "migrate": "#7f8c3d",
}  # fmt: skip
SCHEDULES = 80  # lines of the picture
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1200px;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;margin:.5rem 0 1.5rem}
td,th{padding:.2rem .8rem;border-bottom:1px solid #ddd;text-align:left}
td.n{text-align:right;font-variant-numeric:tabular-nums}.VALID{color:#287d3c}.INVALID{color:#b3261e}.UNKNOWN{color:#8a6100}
code{background:#f3f3f3;padding:.1rem .3rem}svg{width:100%;height:auto}.key span{margin-right:1rem;white-space:nowrap}
@media(prefers-color-scheme:dark){body{background:#16181c;color:#ddd}td,th{border-color:#333}code{background:#222}
.VALID{color:#6fcf8a}.INVALID{color:#ff8a80}.UNKNOWN{color:#e8c060}}
"""


def page(plan: Plan, history: History, verdict: Verdict, said: dict[str, Any]) -> str:
    """The whole of it."""
    word = said["verdict"]
    counts = "".join(f"<tr><td>{name}</td><td class=n>{said['failed'].get(name, 0)}</td></tr>" for name in CLASSES)
    late = "".join(
        f"<tr><td>{escape(phase)}</td><td class=n>{row['count']}</td>"
        + "".join(f"<td class=n>{row[name] * 1000:.0f} ms</td>" for name in ("p50", "p99", "p999", "max"))
        + "</tr>"
        for phase, row in said["late"].items()
    )
    wrong = "".join(
        f"<tr><td>{escape(one['name'])}</td><td>{escape(one['label'])}</td><td class=n>{one['at']:.3f}</td>"
        f"<td>{escape(one['detail'])}</td></tr>" for one in said["violations"]
    )  # fmt: skip
    back = "".join(
        f"<li>{'a lost node’s work started elsewhere' if kind == 'node' else 'after the database returned'}:"
        f" {row['count']} times, at most {row['max']:g} s</li>" for kind, row in said["recovery"].items()
    )  # fmt: skip
    key = "".join(
        f"<span><svg viewBox='0 0 10 10' style='width:.8em'><rect width=10 height=10 fill='{COLOURS[kind]}'/></svg>"
        f" {kind} {count}</span>" for kind, count in said["faults"].items()
    )  # fmt: skip
    why = "".join(f"<li>{escape(one)}</li>" for one in said["why"])
    facts = said["expected"]
    return f"""<!doctype html><html lang=en><meta charset=utf-8><title>timebell torture: {word}</title>
<meta name=viewport content="width=device-width"><style>{STYLE}</style>
<h1>timebell torture: <span class={word}>{word}</span></h1>
<p>{plan.minutes:g} min on {escape(plan.store)}, {len(plan.nodes)} nodes, seed {plan.seed}.
{facts["must"]} occurrences had to fire, {facts["may"]} might, {facts["mustnot"]} must not;
{said["effects"]} attempts arrived, {said["operations"]} operations were asked.
{said["justified"]} second deliveries had a fault to explain them.</p>
<p><code>{escape(said["again"])}</code></p>
{f"<h2>Why it says nothing</h2><ul>{why}</ul>" if why else ""}
<h2>What had to fire</h2><p class=key>{key}</p>{picture(plan, history, verdict)}
<h2>Late by</h2><table><tr><th>phase<th>starts<th>p50<th>p99<th>p99.9<th>most</tr>{late}</table><ul>{back}</ul>
<h2>Violations</h2><table>{counts}</table>{f"<table>{wrong}</table>" if wrong else ""}</html>
"""


def picture(plan: Plan, history: History, verdict: Verdict) -> str:
    """Due instants as bars, green where they fired and red where not, on bands of what was broken."""
    length = max(1.0, history.end)
    lanes = sorted({(fault.kind, fault.target) for fault in history.faults})
    failing = {label for label, _, fired in verdict.targets if not fired}
    labels = sorted({label for label, _, _ in verdict.targets if not label.startswith(("shot", "burst"))})
    labels = ["one-shots", *sorted(labels, key=lambda label: label not in failing)[: SCHEDULES - 1]]
    top = len(lanes) * ROW * 2 + 10
    height = top + len(labels) * ROW + 20

    def x(at: float) -> float:
        return LEFT + at / length * (WIDTH - LEFT)

    parts = [f"<svg viewBox='0 0 {WIDTH} {height}' role=img aria-label='Due instants and faults over time'>"]
    for fault in history.faults:
        colour, y = COLOURS[fault.kind], lanes.index((fault.kind, fault.target)) * ROW * 2
        wide = max(1.0, x(fault.end) - x(fault.start))
        title = f"<title>{fault.kind} {escape(fault.target)} {fault.start:.1f}–{fault.end:.1f} s</title>"
        parts.append(
            f"<rect x={x(fault.start):.1f} y={y} width={wide:.1f} height={ROW * 2 - 2} fill='{colour}'>{title}</rect>"
        )
        parts.append(
            f"<rect x={x(fault.start):.1f} y={top} width={wide:.1f} height={height - top - 20} fill='{colour}'"
            " opacity=.13 />"
        )
    for kind, target in lanes:
        y = lanes.index((kind, target)) * ROW * 2 + 10
        parts.append(f"<text x=0 y={y} font-size=10 fill=currentColor>{kind} {escape(target)}</text>")
    rows = {label: number for number, label in enumerate(labels)}
    for label, due, fired in verdict.targets:
        row = rows.get("one-shots" if label.startswith(("shot", "burst")) else label)
        if row is not None:
            colour = "#3a9d5d" if fired else "#d62728"
            parts.append(f"<rect x={x(due):.1f} y={top + row * ROW} width=1.2 height={ROW - 1} fill='{colour}'/>")
    for label, row in rows.items():
        parts.append(f"<text x=0 y={top + row * ROW + 6} font-size=6 fill=currentColor>{escape(label)}</text>")
    for second in range(0, int(length) + 1, max(10, int(length / 12) // 10 * 10)):
        parts.append(f"<text x={x(second):.0f} y={height - 5} font-size=10 fill=currentColor>{second} s</text>")
    return "".join(parts) + "</svg>"
