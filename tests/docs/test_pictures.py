"""The pictures of the documentation: the recording is rendered like a terminal, and every picture is used."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from scripts import recording
from scripts.recording import COLUMNS, Line, Step

from .pages import DOCS, PAGES

TEXT = "{http://www.w3.org/2000/svg}text"


def rows(picture: str) -> list[str]:
    """Return the text of each row of a rendered recording."""
    return ["".join(text.itertext()) for text in ElementTree.fromstring(picture).iter(TEXT)]


def test_lines_appear_in_color_at_their_time_and_wrap_at_the_width_of_the_terminal() -> None:
    picture = recording.render([Line(0.5, "\x1b[31mfailed\x1b[0m <tea>"), Line(2, "x" * COLUMNS + "yz")])
    assert rows(picture) == ["failed <tea>", "x" * COLUMNS, "yz"]
    assert re.search(r'animation-delay:0\.50s"><tspan class="red">failed</tspan> &lt;tea', picture)
    assert picture.count("animation-delay:2.00s") == 2


def test_commands_run_in_a_terminal_and_endless_ones_are_interrupted() -> None:
    script = "import sys, time; print(sys.stdout.isatty(), flush=True); time.sleep(600)"
    lines = recording.record([Step(f'python -c "{script}"', until="True"), Step("echo done")])
    texts = [line.text for line in lines]
    assert texts[1] == "True"
    assert texts[-1] == "done"
    assert [line.seconds for line in lines] == sorted(line.seconds for line in lines)


def test_the_recording_shows_the_commands_of_the_session() -> None:
    shown = rows(recording.PICTURE.read_text())
    for step in recording.SESSION:
        assert f"$ {step.command}" in shown
    assert "cancelled: prevented" in shown
    assert not any("/work" in row or "/tmp" in row for row in shown)


def test_every_picture_is_on_a_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    unused = [file.name for file in (DOCS / "img").iterdir() if f"img/{file.name}" not in text]
    assert unused == []
