"""MkDocs hooks: pages generated from the code, links between folders, and fences with file names.

The pages are also read in editors and on code hosting sites, so they use the Markdown of these, not that of MkDocs.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from timebell.api import v1

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w+) ([^\n{=]+)$", re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s:#]+)(#[^)\s]*)?(\))")
CODE_IN_TABLE = re.compile(r"`[^`\n]*\\\|[^`\n]*`")
# Files outside of the documentation folder, and their pages on the site.
EXTERNAL_PAGES = {"benchmarks/README.md": "reference/benchmarks.md", "CHANGELOG.md": "reference/changes.md"}
TABS = {"start": "Start", "reference": "Reference", "internals": "Internals", "guides": "Scheduler service"}
# Addresses from which the theme loads diagrams, repository statistics, and polyfills for browsers from before 2020.
REMOTE_ADDRESSES = re.compile(rb"https://(?:unpkg\.com/[^\"'`]*|api\.github\.com)")
log = logging.getLogger("mkdocs.timebell")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Generate anchors of headings like code hosting sites do."""
    config.mdx_configs.setdefault("toc", {}).update(slugify=_slug, permalink=True)
    return config


def _slug(text: str, _: str) -> str:
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add generated and external pages, and add pages that the navigation does not list to the tab of their folder."""
    added = {uri: (ROOT / source).read_text() for source, uri in EXTERNAL_PAGES.items()}
    added |= {"reference/commands.md": commands(), "reference/operations.md": operations()}
    added["reference/openapi.json"] = v1.render_openapi().decode()
    for uri, text in added.items():
        files.append(File.generated(config, uri, content=text))
    listed = set(_list_pages(config.nav))
    for file in files.documentation_pages():
        if file.src_uri not in listed:
            tab = TABS[PurePosixPath(file.src_uri).parts[0]]
            next(part[tab] for part in config.nav if tab in part).append(file.src_uri)
    return files


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


def commands() -> str:
    """Return the page of all commands with their arguments and options, from their help texts."""
    from timebell.cli.main import root

    lines = ["# Every command", "", "The output of `--help` of every command, generated from the code.", ""]
    lines += _command(root, "timebell", None)
    return "\n".join(lines)


def _command(command: Any, name: str, parent: Any) -> Iterator[str]:
    context = command.context_class(command, parent=parent, info_name=name.rpartition(" ")[2])
    children = getattr(command, "commands", None)
    if children is None:
        yield f"## {name}"
        yield ""
        yield _escape(command.help or "")
        yield ""
        yield f"```text\n{name} {' '.join(command.collect_usage_pieces(context))}\n```"
        yield ""
        records = [each.get_help_record(context) for each in command.get_params(context)]
        options = [record for record in records if record is not None and record[0] != "--help"]
        if options:
            yield "| | |"
            yield "|---|---|"
            for option, help_ in options:
                description = _escape(help_ or "").replace("|", "\\|")
                yield f"| `{option}` | {description} |"
            yield ""
        return
    for each in sorted(children):
        yield from _command(children[each], f"{name} {each}", context)


def _escape(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[").strip()


def operations() -> str:
    """Return the page of all operations of the API with their fields, from the OpenAPI document."""
    document = v1.build_openapi()
    lines = ["# Every operation", "", "Generated from the [OpenAPI document](openapi.json).", ""]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            lines += [f"## {method.upper()} {path.removeprefix('/api/v1')}", ""]
            lines += [_escape(operation.get("description") or operation.get("summary") or ""), ""]
            lines += [f"Role: `{operation['x-role']}`.", ""]
            lines += _fields(document, operation)
    return "\n".join(lines)


def _fields(document: dict[str, Any], operation: dict[str, Any]) -> Iterator[str]:
    rows = [
        (each["in"], each["name"], _type(each.get("schema", {})), each.get("description", ""), each.get("required"))
        for each in operation.get("parameters", [])
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    body = document["components"]["schemas"].get(body.get("$ref", "").rpartition("/")[2], body)
    for name, schema in body.get("properties", {}).items():
        rows.append(("body", name, _type(schema), schema.get("description", ""), name in body.get("required", [])))
    if rows:
        yield "| in | name | type | |"
        yield "|---|---|---|---|"
        for location, name, kind, description, required in rows:
            text = _escape(description).replace("|", "\\|").replace("\n", " ")
            yield f"| {location} | `{name}` | {kind} | {'required. ' if required else ''}{text} |"
        yield ""


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return f"`{schema.get('type', 'any')}`"
