"""Reference pages generated from the code: one for each group of commands, one for each group of API operations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from timebell.api import v1

Schema = dict[str, Any]


def render_pages() -> dict[str, str]:
    """Return the Markdown of all generated pages by path."""
    return command_pages() | operation_pages()


def command_pages() -> dict[str, str]:
    """Return a page for each top-level command with arguments and options, from the help texts, and their index."""
    from timebell.cli.main import root

    pages, rows = {}, []
    for name in sorted(root.commands):
        command, uri = root.commands[name], f"reference/commands/{name}.md"
        lines = [f"# timebell {name}", "", *_command(command, f"timebell {name}", None)]
        pages[uri] = "\n".join(lines)
        summary = _escape((command.help or "").partition("\n")[0])
        rows.append(f"| [`timebell {name}`](commands/{name}.md) | {summary} |")
    head = ["# Every command", "", "Generated from the code.", "", "| command | |", "|---|---|"]
    return {"reference/commands.md": "\n".join([*head, *rows]), **pages}


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
            yield "| option | meaning |"
            yield "|---|---|"
            for option, help_ in options:
                description = _escape(help_ or "").replace("|", "\\|")
                yield f"| `{option}` | {description} |"
            yield ""
        return
    for each in sorted(children):
        yield from _command(children[each], f"{name} {each}", context)


def operation_pages() -> dict[str, str]:
    """Return a page for each tag of the OpenAPI document, and their index."""
    document = v1.build_openapi()
    by_tag: dict[str, list[tuple[str, str, dict[str, Any]]]] = defaultdict(list)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            name = f"{method.upper()} {path.removeprefix('/api/v1')}"
            by_tag[operation["tags"][0]].append((name, path, operation))
    pages = {}
    lines = ["# Every operation", "", "Generated from the [OpenAPI document](openapi.json); paths are below `/api/v1`.",
             "", "| resource | operations |", "|---|---|"]  # fmt: skip
    for tag, operations in sorted(by_tag.items()):
        file = f"{tag.replace(' ', '-')}.md"
        pages[f"reference/api/{file}"] = "\n".join(_operations(document, tag, operations))
        lines.append(f"| [{tag}](api/{file}) | {', '.join(f'`{name}`' for name, *_ in operations)} |")
    return {"reference/operations.md": "\n".join(lines), **pages}


def _operations(document: Schema, tag: str, operations: list[tuple[str, str, dict[str, Any]]]) -> Iterator[str]:
    yield f"# API: {tag}"
    yield ""
    for name, path, operation in operations:
        yield f"## {name}"
        yield ""
        yield _escape(operation.get("description") or operation.get("summary") or "")
        yield ""
        yield f"Role: `{operation['x-role']}`."
        yield ""
        yield f"```sh\n{_curl(name.partition(' ')[0], path, operation)}\n```"
        yield ""
        yield from _fields(document, operation)
        yield from _answer(document, operation)


def _curl(method: str, path: str, operation: dict[str, Any]) -> str:
    body = " \\\n  -H 'content-type: application/json' -d '{...}'" if "requestBody" in operation else ""
    return f'curl -X {method} "$TIMEBELL_URL{path}" -H "Authorization: Bearer $TIMEBELL_API_KEY"{body}'


def _fields(document: Schema, operation: dict[str, Any]) -> Iterator[str]:
    rows = [
        (each["in"], each["name"], _type(each.get("schema", {})), each.get("description", ""), each.get("required"))
        for each in operation.get("parameters", [])
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    body = _resolve(document, body)
    for name, schema in body.get("properties", {}).items():
        rows.append(("body", name, _type(schema), schema.get("description", ""), name in body.get("required", [])))
    if rows:
        yield "| in | name | type | meaning |"
        yield "|---|---|---|---|"
        for location, name, kind, description, required in rows:
            yield f"| {location} | `{name}` | {kind} | {'required. ' if required else ''}{_cell(description)} |"
        yield ""


def _answer(document: Schema, operation: dict[str, Any]) -> Iterator[str]:
    for status, response in operation["responses"].items():
        schema = response.get("content", {}).get("application/json", {}).get("schema")
        if not status.startswith("2"):
            continue
        fields = _resolve(document, schema or {}).get("properties", {})
        names = ", ".join(f"`{name}`" for name in fields)
        kind = f" ({_type(schema)})" if schema else ""
        yield f"Answers {status}{kind}{': ' + names if names else ''}."
        yield ""


def _resolve(document: Schema, schema: Schema) -> Schema:
    resolved: Schema = document["components"]["schemas"].get(schema.get("$ref", "").rpartition("/")[2], schema)
    return resolved


def _type(schema: Schema) -> str:
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return f"`{schema.get('type', 'any')}`"


def _cell(text: str) -> str:
    return _escape(text).replace("|", "\\|").replace("\n", " ")


def _escape(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[").strip()
