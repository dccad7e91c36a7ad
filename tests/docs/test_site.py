"""The documentation site builds with strict links, and its pages load nothing from other origins."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from scripts.publish_site import publish
from timebell.api import v1

from .pages import DOCS, ROOT

# Attributes whose URLs a browser fetches by itself (unlike those of `a`).
FETCHED_ATTRIBUTES = {
    "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src", "embed": "src",
    "object": "data", "link": "href", "form": "action", "use": "href", "image": "href", "base": "href",
}  # fmt: skip
OUTSIDE = re.compile(r"^\s*(?:https?:)?//", re.IGNORECASE)
URLS_IN_SCRIPTS = {"https://bit.ly/2s3ChXG"}  # in the text of a warning of the search


class Fetches(HTMLParser):
    """URLs that a browser fetches for a page, and its inline styles."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.styles: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.styles.append(attributes.get("style") or "")
        if tag == "link" and attributes.get("rel") in ("canonical", "next", "prev"):
            return  # metadata, not fetched
        if url := attributes.get(FETCHED_ATTRIBUTES.get(tag, "")):
            self.urls.append(url)
        self.urls += [part.split()[0] for part in (attributes.get("srcset") or "").split(",") if part.split()]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site like `make docs`."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-f", "docs-site/mkdocs.yml", "-d", folder],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": "src", "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stderr
    return folder


def test_every_page_is_built_and_in_the_navigation(site: Path) -> None:
    home = (site / "index.html").read_text()
    for page in DOCS.rglob("*.md"):
        name = str(page.relative_to(DOCS)).removesuffix(".md")
        name = "index" if name == "README" else name
        assert (site / f"{name}.html").is_file(), name
        folder = {"guides", "start", "compare", "reference", "internals"} & {name.partition("/")[0]}
        assert name == "index" or folder or f'href="{name}.html"' in home, name
    for tab in ("Home", "Learn", "Guides", "Cookbook", "Troubleshooting", "Compare", "Reference", "Internals"):
        assert re.search(rf">\s*{tab}\s*<", home), tab


def test_pages_load_nothing_from_other_origins(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        fetches = Fetches(page)
        assert fetches.urls, page
        assert [url for url in fetches.urls if OUTSIDE.match(url)] == [], page
        assert not any("url(" in style for style in fetches.styles), page
        assert "fonts.g" not in page.read_text(), page
    for sheet in site.rglob("*.css"):
        urls = re.findall(r"(?:@import\s+|url\()\s*[\"']?([^\"')\s]+)", sheet.read_text())
        assert [url for url in urls if OUTSIDE.match(url)] == [], sheet
    for script in site.rglob("*.js"):
        code = re.sub(r"/\*.*?\*/", "", script.read_text(), flags=re.DOTALL)
        assert set(re.findall(r"https?://[\w-]+\.[\w./-]+", code)) <= URLS_IN_SCRIPTS, script


def test_every_command_and_operation_is_on_a_generated_page(site: Path) -> None:
    commands = "".join(page.read_text() for page in (site / "reference" / "commands").glob("*.html"))
    for command in ("timebell db upgrade", "timebell campaign create", "timebell simulate"):
        assert re.search(rf"<h2[^>]*>{command}<", commands), command
    operations = "".join(page.read_text() for page in (site / "reference" / "api").glob("*.html"))
    documented = re.findall(r'<h2 id="[^"]*">(\w+ /[^<]*)<', operations)
    assert sorted(documented) == sorted(
        f"{method.upper()} {path.removeprefix('/api/v1')}"
        for path, methods in v1.build_openapi()["paths"].items()
        for method in methods
    )
    index = (site / "reference" / "operations.html").read_text()
    assert all(f'href="api/{page.name}"' in index for page in (site / "reference" / "api").glob("*.html"))


def test_the_site_has_a_search_index_and_a_dark_theme(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert any(entry["location"].startswith("guides/cookbook.html#") for entry in index["docs"])
    assert 'data-md-color-scheme="slate"' in (site / "index.html").read_text()


def test_versions_are_published_beside_each_other(tmp_path: Path) -> None:
    for version in ("0.1.0", "0.2.0", "0.10.0rc1", "0.2.1"):
        built = tmp_path / f"built-{version}"
        built.mkdir()
        (built / "index.html").write_text(version)
        publish(built, tmp_path / "site", version)
    listed = json.loads((tmp_path / "site" / "versions.json").read_text())
    assert [(each["version"], each["aliases"]) for each in listed] == [("0.10", []), ("0.2", ["latest"]), ("0.1", [])]
    assert (tmp_path / "site" / "0.2" / "index.html").read_text() == "0.2.1"
    assert "url=0.2/" in (tmp_path / "site" / "index.html").read_text()


def test_markdown_of_github_is_rendered_correctly(site: Path) -> None:
    page = (site / "guides" / "production.html").read_text()
    assert '<span class="filename">tasks.py</span>' in page  # a fence with a file name
    assert "```" not in re.sub(r"<pre.*?</pre>|<code.*?</code>", "", page, flags=re.DOTALL)
    commands = (site / "reference" / "command-line.html").read_text()
    assert "refuse|skip|now" in commands  # a pipe within a table cell
    assert 'href="../start/first-steps.html"' in (site / "guides" / "jobs.html").read_text()
    assert (
        'href="guarantees.html#comparison-with-other-schedulers"'
        in (site / "reference" / "benchmarks.html").read_text()
    )
