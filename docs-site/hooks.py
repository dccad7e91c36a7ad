"""MkDocs hooks: pages generated from the code, links between folders, and fences with file names.

The pages are also read in editors and on code hosting sites, so they use the Markdown of these, not that of MkDocs.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from generated_pages import render_pages

import hatch_version
from timebell.api import v1

FENCE = re.compile(r"^```(\w+) ([^\n{=]+)$", re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s:#]+)(#[^)\s]*)?(\))")
CODE_IN_TABLE = re.compile(r"`[^`\n]*\\\|[^`\n]*`")
# Files outside of the documentation folder, and their pages on the site.
EXTERNAL_PAGES = {"benchmarks/README.md": "reference/benchmarks.md", "CHANGELOG.md": "reference/changes.md"}
TABS = {"start": "Learn", "compare": "Compare", "reference": "Reference", "internals": "Internals", "guides": "Guides"}
GROUPS = {"api": "HTTP API", "commands": "Command line"}
"""Sections of generated pages, by their folder in `reference`."""
# Addresses from which the theme loads diagrams, repository statistics, and polyfills for browsers from before 2020.
REMOTE_ADDRESSES = re.compile(rb"https://(?:unpkg\.com/[^\"'`]*|api\.github\.com)")
log = logging.getLogger("mkdocs.timebell")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Generate anchors of headings like code hosting sites do."""
    config.mdx_configs.setdefault("toc", {}).update(slugify=_slug, permalink=True)
    config.copyright = f"Timebell {hatch_version.version()}"
    return config


def _slug(text: str, _: str) -> str:
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add generated and external pages, and add pages that the navigation does not list to the tab of their folder."""
    added = {uri: (ROOT / source).read_text() for source, uri in EXTERNAL_PAGES.items()}
    added |= render_pages()
    added["reference/openapi.json"] = v1.render_openapi().decode()
    for uri, text in added.items():
        files.append(File.generated(config, uri, content=text))
    listed = set(_list_pages(config.nav))
    for file in files.documentation_pages():
        if file.src_uri not in listed:
            parts = PurePosixPath(file.src_uri).parts
            section = _section(config.nav, TABS[parts[0]])
            (_section(section, GROUPS[parts[1]]) if parts[1] in GROUPS else section).append(file.src_uri)
    return files


def _section(nav: list[Any], title: str) -> list[Any]:
    pages: list[Any] = next(part[title] for part in nav if isinstance(part, dict) and title in part)
    return pages


def _list_pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from _list_pages(each)


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert fences with file names, links out of the folder, and pipes in tables to the syntax of MkDocs."""
    source = {uri: path for path, uri in EXTERNAL_PAGES.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    source_folder = (ROOT / source).parent
    page_folder = PurePosixPath(page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        before, path, anchor, after = match.groups()
        target = (source_folder / path).resolve()
        if not target.is_relative_to(ROOT) or (target.is_relative_to(ROOT / "docs") and source.startswith("docs/")):
            return match[0]
        name = str(target.relative_to(ROOT))
        uri = EXTERNAL_PAGES.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else None)
        if uri is None:
            return match[0]
        up = "../" * len(page_folder.parts)
        return f"{before}{up}{uri}{anchor or ''}{after}"

    markdown = FENCE.sub(lambda match: f'```{match[1]} title="{match[2].strip()}"', markdown)
    lines = [
        CODE_IN_TABLE.sub(lambda match: match[0].replace("\\|", "|"), line) if line.startswith("|") else line
        for line in markdown.splitlines()
    ]
    return LINK.sub(link, "\n".join(lines))


def on_post_build(*, config: MkDocsConfig) -> None:
    """Remove remote addresses from scripts, and the search indexes of unused languages."""
    shutil.rmtree(Path(config.site_dir) / "assets" / "javascripts" / "lunr", ignore_errors=True)
    for path in Path(config.site_dir).rglob("*.js"):
        text = path.read_bytes()
        if (cleaned := REMOTE_ADDRESSES.sub(b"", text)) != text:
            path.write_bytes(cleaned)
