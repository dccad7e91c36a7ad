"""What MkDocs does with our pages: the ones that are written from the code, links as they are on the site, and fences.

The pages are read on their own as well (in an editor, in a forge), so they follow those habits and not MkDocs'.
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

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w+) ([^\n{=]+)$", re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s:#]+)(#[^)\s]*)?(\))")
CODE_IN_TABLE = re.compile(r"`[^`\n]*\\\|[^`\n]*`")
# Files that are no page of the folder, and the page that they are on the site.
ELSEWHERE = {"benchmarks/README.md": "reference/benchmarks.md", "CHANGELOG.md": "reference/changes.md"}
TABS = {"start": "Start", "reference": "Reference", "internals": "Internals", "promises": "Promises",
        "guides": "Scheduler service"}  # fmt: skip
# What the theme would ask for diagrams, for the stars of a repository, and in browsers of before 2020.
ASKED = re.compile(rb"https://(?:unpkg\.com/[^\"'`]*|api\.github\.com)")
log = logging.getLogger("mkdocs.timebell")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Headings are named as forges name them."""
    config.mdx_configs.setdefault("toc", {}).update(slugify=_slug, permalink=True)
    return config


def _slug(text: str, _: str) -> str:
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Pages written from the code, and those that lie elsewhere; and a place for each that the navigation forgot."""
    written = {where: (ROOT / source).read_text() for source, where in ELSEWHERE.items()}
    written |= {"reference/commands.md": commands(), "reference/operations.md": operations()}
    for where, text in written.items():
        files.append(File.generated(config, where, content=text))
    named = set(_leaves(config.nav))
    for file in files.documentation_pages():
        if file.src_uri not in named:
            tab = TABS[PurePosixPath(file.src_uri).parts[0]]
            next(part[tab] for part in config.nav if tab in part).append(file.src_uri)
    return files


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from _leaves(each)


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fences with a file's name, links out of the folder, and pipes in tables, as MkDocs wants them."""
    source = {where: given for given, where in ELSEWHERE.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    here = (ROOT / source).parent
    at = PurePosixPath(page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        before, path, anchor, after = match.groups()
        target = (here / path).resolve()
        if not target.is_relative_to(ROOT) or (target.is_relative_to(ROOT / "docs") and source.startswith("docs/")):
            return match[0]
        name = str(target.relative_to(ROOT))
        inside = ELSEWHERE.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else None)
        if inside is None:
            return match[0]
        up = "../" * len(at.parts)
        return f"{before}{up}{inside}{anchor or ''}{after}"

    markdown = FENCE.sub(lambda match: f'```{match[1]} title="{match[2].strip()}"', markdown)
    lines = [
        CODE_IN_TABLE.sub(lambda match: match[0].replace("\\|", "|"), line) if line.startswith("|") else line
        for line in markdown.splitlines()
    ]
    return LINK.sub(link, "\n".join(lines))


def on_post_build(*, config: MkDocsConfig) -> None:
    """Nothing that is built can load anything from elsewhere; and no search in languages that there are no pages in."""
    shutil.rmtree(Path(config.site_dir) / "assets" / "javascripts" / "lunr", ignore_errors=True)
    for path in Path(config.site_dir).rglob("*.js"):
        text = path.read_bytes()
        if (without := ASKED.sub(b"", text)) != text:
            path.write_bytes(without)


def commands() -> str:
    """Every command with its arguments and options, as `--help` says them."""
    from timebell.cli.main import root

    lines = ["# Every command", "", "What `--help` says, written from the code when this site was built.", ""]
    lines += _command(root, "timebell", None)
    return "\n".join(lines)


def _command(command: Any, name: str, parent: Any) -> Iterator[str]:
    context = command.context_class(command, parent=parent, info_name=name.rpartition(" ")[2])
    children = getattr(command, "commands", None)
    if children is None:
        yield f"## {name}"
        yield ""
        yield _plain(command.help or "")
        yield ""
        yield f"```text\n{name} {' '.join(command.collect_usage_pieces(context))}\n```"
        yield ""
        told = [record for each in command.get_params(context) if (record := each.get_help_record(context)) is not None]
        told = [record for record in told if record[0] != "--help"]
        if told:
            yield "| | |"
            yield "|---|---|"
            for what, help_ in told:
                said = _plain(help_ or "").replace("|", "\\|")
                yield f"| `{what}` | {said} |"
            yield ""
        return
    for each in sorted(children):
        yield from _command(children[each], f"{name} {each}", context)


def _plain(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[").strip()


def operations() -> str:
    """Every operation of the API with its fields, from the OpenAPI document."""
    from timebell.api import v1

    document = v1.openapi()
    lines = ["# Every operation", "", "Written from the [OpenAPI document](openapi.json) when this site was built.", ""]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            lines += [f"## {method.upper()} {path.removeprefix('/api/v1')}", ""]
            lines += [_plain(operation.get("description") or operation.get("summary") or ""), ""]
            lines += [f"Role: `{operation['x-role']}`.", ""]
            lines += _fields(document, operation)
    return "\n".join(lines)


def _fields(document: dict[str, Any], operation: dict[str, Any]) -> Iterator[str]:
    rows = [
        (each["in"], each["name"], _type(each.get("schema", {})), each.get("description", ""), each.get("required"))
        for each in operation.get("parameters", [])
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    about = document["components"]["schemas"].get(body.get("$ref", "").rpartition("/")[2], body)
    for name, schema in about.get("properties", {}).items():
        rows.append(("body", name, _type(schema), schema.get("description", ""), name in about.get("required", [])))
    if rows:
        yield "| in | name | type | |"
        yield "|---|---|---|---|"
        for where, name, kind, says, needed in rows:
            said = _plain(says).replace("|", "\\|").replace("\n", " ")
            yield f"| {where} | `{name}` | {kind} | {'required. ' if needed else ''}{said} |"
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
