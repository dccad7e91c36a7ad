"""Pages of the documentation with their fenced blocks, links and tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
_FENCE = re.compile(r"^```(\w+)?[ ]?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """Fenced block: language, rest of the info string, text, and number of its first line in the page."""

    page: Path
    language: str
    info: str
    text: str
    line: int


def name_of(page: Path) -> str:
    """Return the path of a page relative to the repository."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(page, match[1] or "", match[2].strip(), match[3], text.count("\n", 0, match.start()) + 2)
        for match in _FENCE.finditer(text)
    ]


def links(page: Path) -> list[str]:
    """Return the targets of the links outside of fenced blocks."""
    return _LINK.findall(_FENCE.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """Return the anchors of all headings."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def rows(page: Path, heading: str | None = None) -> Iterator[list[str]]:
    """Yield the rows of the tables of a page, or of one section, without the header."""
    text = _FENCE.sub("", page.read_text())
    if heading is not None:
        text = re.split(rf"^## {re.escape(heading)}$", text, maxsplit=1, flags=re.MULTILINE)[1]
        text = re.split(r"^## ", text, maxsplit=1, flags=re.MULTILINE)[0]
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        for line in table.splitlines()[2:]:
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def code_words(cell: str) -> list[str]:
    """Return the texts in backquotes."""
    return re.findall(r"`([^`]+)`", cell)
