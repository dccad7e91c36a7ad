"""The pages of the documentation, and what is in them: fenced blocks, links, tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
_FENCE = re.compile(r"^```(\w+)?[ ]?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the rest of the info string, its text and first line in the page."""

    page: Path
    language: str
    info: str
    text: str
    line: int


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(page, match[1] or "", match[2].strip(), match[3], text.count("\n", 0, match.start()) + 2)
        for match in _FENCE.finditer(text)
    ]


def links(page: Path) -> list[str]:
    """Where the links outside of blocks lead."""
    return _LINK.findall(_FENCE.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """The headings as links name them."""
    heads = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def rows(page: Path, heading: str | None = None) -> Iterator[list[str]]:
    """The rows of the tables of a page, or of one section of it, without head and rule."""
    text = _FENCE.sub("", page.read_text())
    if heading is not None:
        text = re.split(rf"^## {re.escape(heading)}$", text, maxsplit=1, flags=re.MULTILINE)[1]
        text = re.split(r"^## ", text, maxsplit=1, flags=re.MULTILINE)[0]
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        for line in table.splitlines()[2:]:
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def code_words(cell: str) -> list[str]:
    """What stands in backquotes."""
    return re.findall(r"`([^`]+)`", cell)
