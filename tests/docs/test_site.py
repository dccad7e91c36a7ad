"""The site: it builds with strict links, and what it shows loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from timebell.api import v1

from .pages import DOCS, ROOT

# What a browser fetches by itself; `a` is for the reader to follow.
FETCHED = {
    "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src", "embed": "src",
    "object": "data", "link": "href", "form": "action", "use": "href", "image": "href", "base": "href",
}  # fmt: skip
OUTSIDE = re.compile(r"^\s*(?:https?:)?//", re.IGNORECASE)
NAMED_IN_SCRIPTS = {"https://bit.ly/2s3ChXG"}  # within a warning of the search, for people


class Fetches(HTMLParser):
    """What a page makes a browser fetch."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.styles: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.styles.append(given.get("style") or "")
        if tag == "link" and given.get("rel") in ("canonical", "next", "prev"):
            return  # said, not fetched
        if wanted := given.get(FETCHED.get(tag, "")):
            self.found.append(wanted)
        self.found += [part.split()[0] for part in (given.get("srcset") or "").split(",") if part.split()]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-f", "docs-site/mkdocs.yml", "-d", folder],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": "src", "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stderr
    return folder


def test_every_page_is_there_and_in_the_navigation(site: Path) -> None:
    home = (site / "index.html").read_text()
    for page in DOCS.rglob("*.md"):
        name = str(page.relative_to(DOCS)).removesuffix(".md")
        name = "index" if name == "README" else name
        assert (site / f"{name}.html").is_file(), name
        folder = {"guides", "start", "reference", "internals", "promises"} & {name.partition("/")[0]}
        assert name == "index" or folder or f'href="{name}.html"' in home, name
    for tab in ("Start", "Scheduler service", "Library", "Push", "Triggers and reminders", "Recipes", "Reference"):
        assert re.search(rf">\s*{tab}\s*<", home), tab


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        fetches = Fetches(page)
        assert fetches.found, page
        assert [one for one in fetches.found if OUTSIDE.match(one)] == [], page
        assert not any("url(" in style for style in fetches.styles), page
        assert "fonts.g" not in page.read_text(), page
    for sheet in site.rglob("*.css"):
        named = re.findall(r"(?:@import\s+|url\()\s*[\"']?([^\"')\s]+)", sheet.read_text())
        assert [one for one in named if OUTSIDE.match(one)] == [], sheet
    for script in site.rglob("*.js"):
        code = re.sub(r"/\*.*?\*/", "", script.read_text(), flags=re.DOTALL)
        assert set(re.findall(r"https?://[\w-]+\.[\w./-]+", code)) <= NAMED_IN_SCRIPTS, script


def test_commands_and_operations_are_written_from_the_code(site: Path) -> None:
    commands = (site / "reference" / "commands.html").read_text()
    for one in ("timebell db upgrade", "timebell campaign create", "timebell simulate"):
        assert re.search(rf"<h2[^>]*>{one}<", commands), one
    operations = (site / "reference" / "operations.html").read_text()
    told = re.findall(r'<h2 id="[^"]*">(\w+ /[^<]*)<', operations)
    assert set(told) == {
        f"{method.upper()} {path.removeprefix('/api/v1')}"
        for path, methods in v1.openapi()["paths"].items()
        for method in methods
    }


def test_what_markdown_elsewhere_knows_is_shown_as_it_is_meant(site: Path) -> None:
    first = (site / "guides" / "production.html").read_text()
    assert '<span class="filename">tasks.py</span>' in first  # a fence with a file's name
    assert "```" not in re.sub(r"<pre.*?</pre>|<code.*?</code>", "", first, flags=re.DOTALL)
    commands = (site / "reference" / "command-line.html").read_text()
    assert "refuse|skip|now" in commands  # a pipe within a table
    assert 'href="../start/first-steps.html"' in (site / "guides" / "jobs.html").read_text()
    assert 'href="guarantees.html#beside-others"' in (site / "reference" / "benchmarks.html").read_text()
