"""Record the terminal session of the README: `python -m scripts.recording` writes docs/img/recording.svg.

The commands run in a real terminal of `COLUMNS` columns, with the program that the README shows. Pauses without output
are cut to `MAX_PAUSE_SECONDS`, and folder and port are replaced by those of a usual installation. The animation plays
once and ends with the whole session, which is also what readers see who prefer no motion.
"""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "img" / "recording.svg"
COLUMNS, CHARACTER_WIDTH, LINE_HEIGHT, MARGIN = 112, 7.83, 19, 18
MAX_PAUSE_SECONDS, TYPING_SECONDS, TIMEOUT_SECONDS = 1.2, 1.0, 180
SGR = re.compile(r"\x1b\[([\d;]*)m")
OTHER_ESCAPES = re.compile(r"\x1b\[[\d;?]*[A-Za-ln-z]|\r")
STYLES = {"1": "bold", "2": "dim", "31": "red", "32": "green", "33": "yellow", "36": "cyan"}

TITLE = "A terminal: timebell dev runs the program, next previews a clock change, why explains a run"
CSS = (
    "text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#e6e1d6;"
    "white-space:pre;opacity:0;animation:show .01s forwards}"
    "@keyframes show{to{opacity:1}}@media(prefers-reduced-motion:reduce){text{opacity:1;animation:none}}"
    ".bold{font-weight:600;fill:#fff}.dim{fill:#9a948a}.red{fill:#ff7b6b}.green{fill:#7bd88f}.yellow{fill:#f0c674}"
    ".cyan{fill:#d9a441}"
)


@dataclass(frozen=True)
class Line:
    """Line of the session with escape sequences, and its time in seconds since the beginning."""

    seconds: float
    text: str


@dataclass(frozen=True)
class Step:
    """Command of the session; one that does not end by itself is interrupted after a line that contains `until`."""

    command: str
    until: str = ""


SESSION = (
    Step("timebell dev reminders.py", until="(attempt 2)"),
    Step('timebell next "30 2 * * *" --timezone America/New_York --count 2 --from 2027-03-13T00:00:00Z'),
    Step("timebell why morning-digest 2027-03-01T09:00"),
)


def readme_program() -> str:
    """Return the program that the README shows as reminders.py."""
    match = re.search(r"^```python reminders\.py\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert match is not None
    return match[1]


def record(steps: Sequence[Step]) -> list[Line]:
    """Run the commands in an empty folder, and return what the terminal shows."""
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "reminders.py").write_text(readme_program())
        for step in steps:
            begin = lines[-1].seconds + TYPING_SECONDS if lines else 0.0
            lines.append(Line(begin, f"\x1b[36m$\x1b[0m \x1b[1m{step.command}\x1b[0m"))
            previous = elapsed = 0.0
            for at, text in run(step, folder):
                elapsed += min(at - previous, MAX_PAUSE_SECONDS)
                previous = at
                lines.append(Line(begin + TYPING_SECONDS + elapsed, text))
    return lines


def run(step: Step, folder: str) -> Iterator[tuple[float, str]]:
    """Run a command in a terminal; yield its lines with seconds since its start."""
    variables = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": str(COLUMNS),
                 "TERM": "xterm-256color", "TZ": "Asia/Seoul", "TIMEBELL_HTTP_PORT": (port := free_port())}  # fmt: skip
    control, terminal = pty.openpty()
    started = time.monotonic()
    process = subprocess.Popen(["sh", "-c", f"exec {step.command}"], cwd=folder, stdin=terminal, stdout=terminal,
                               stderr=terminal, env={**os.environ, **variables}, start_new_session=True)  # fmt: skip
    os.close(terminal)
    try:
        with os.fdopen(control, "rb", buffering=0) as output:
            for text in read_lines(output.fileno()):
                yield time.monotonic() - started, text.replace(f":{port}/", ":8700/").replace(folder, "/srv")
                if step.until and step.until in text:
                    os.killpg(process.pid, signal.SIGINT)
        process.wait(TIMEOUT_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def free_port() -> str:
    """Return a port that no program listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return str(listening.getsockname()[1])


def read_lines(terminal: int) -> Iterator[str]:
    """Yield the lines that are written to a terminal, until it is closed."""
    pending = b""
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # Linux reports the end of a terminal as an error
            data = b""
        if not data:
            break
        *complete, pending = (pending + data).split(b"\n")
        yield from (OTHER_ESCAPES.sub("", line.decode(errors="replace")).rstrip() for line in complete)


def render(lines: Sequence[Line]) -> str:
    """Return the animation as SVG, without scripts."""
    rows = [(line.seconds, row) for line in lines for row in wrap(line.text)]
    width = round(COLUMNS * CHARACTER_WIDTH + 2 * MARGIN)
    height = (len(rows) + 1) * LINE_HEIGHT + 2 * MARGIN
    body = [
        f'<text x="{MARGIN}" y="{MARGIN + (number + 2) * LINE_HEIGHT - 5}" style="animation-delay:{seconds:.2f}s">'
        f"{''.join(render_part(style, text) for style, text in row)}</text>"
        for number, (seconds, row) in enumerate(rows)
        if row
    ]
    circles = "".join(f'<circle cx="{MARGIN + 6 + 18 * n}" cy="{MARGIN}" r="5.5" class="{color}"/>'
                      for n, color in enumerate(("red", "yellow", "green")))  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f"<title>{TITLE}</title><style>{CSS}</style>"
        f'<rect width="{width}" height="{height}" rx="10" fill="#1d1b18"/>{circles}' + "\n".join(body) + "</svg>\n"
    )


def wrap(text: str) -> list[list[tuple[str, str]]]:
    """Return the rows of a line, each as its parts with their styles, wrapped like a terminal does."""
    rows: list[list[tuple[str, str]]] = [[]]
    style, column = "", 0
    for number, part in enumerate(SGR.split(text)):
        if number % 2:
            style = next((STYLES[code] for code in part.split(";") if code in STYLES), "")
            continue
        while part:
            if column == COLUMNS:
                rows.append([])
                column = 0
            fitting, part = part[: COLUMNS - column], part[COLUMNS - column :]
            rows[-1].append((style, fitting))
            column += len(fitting)
    return rows


def render_part(style: str, text: str) -> str:
    """Return text in a style as SVG."""
    return f'<tspan class="{style}">{escape(text)}</tspan>' if style else escape(text)


if __name__ == "__main__":
    PICTURE.write_text(render(record(SESSION)))
    print(PICTURE.relative_to(ROOT))
