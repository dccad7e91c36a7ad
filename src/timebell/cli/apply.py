"""`timebell apply` and `timebell export`: schedules and targets as files under version control."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from timebell.cli.output import DIFFERENT, FAILED, print_data, print_message

if TYPE_CHECKING:
    from timebell.cli.remote import ServerClient

# The API accepts both names of each pair; documents are normalized to the second.
FIELD_ALIASES = {"jobType": "topic", "jobPayload": "payload"}
DOCUMENT_KINDS = ("Schedule", "Target")
FILE_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass
class Plan:
    """Difference between files and server."""

    targets: list[tuple[dict[str, Any], list[str]]] = field(default_factory=list)
    """Request bodies of targets to write, each with its changed fields; none for a new target."""
    create: list[dict[str, Any]] = field(default_factory=list)
    change: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = field(default_factory=list)
    delete: list[dict[str, Any]] = field(default_factory=list)
    unchanged: int = 0

    def __bool__(self) -> bool:
        return bool(self.targets or self.create or self.change or self.delete)


@click.command("apply")
@click.option(
    "--file",
    "-f",
    type=click.Path(path_type=Path),
    required=True,
    help="YAML or JSON file, or a folder of such files; - for stdin.",
)
@click.option("--diff", is_flag=True, help="Only show the differences; exit 7 if there are any.")
@click.option("--dry-run", is_flag=True, help="Only show the planned changes.")
@click.option("--prune", is_flag=True, help="Delete schedules that are in no file; keep those defined in code.")
@click.option("--yes", "-y", is_flag=True, help="Delete without confirmation.")
def apply_(file: Path, diff: bool, dry_run: bool, prune: bool, yes: bool) -> None:
    """Create and update schedules and targets from files. Every schedule is validated before the first write."""
    from timebell.cli.inputs import confirm
    from timebell.cli.progress import status_line
    from timebell.cli.schedule import server_client

    remote = server_client()
    plan = plan_changes(remote, list(documents(file)), prune=prune)
    for line in describe_plan(plan, prune=prune):
        print_data(line)
    changed = len(plan.change) + sum(bool(lines) for _, lines in plan.targets)
    created = len(plan.create) + sum(not lines for _, lines in plan.targets)
    counts = f"{changed} to change, {created} to create, {len(plan.delete)} to delete"
    if diff or dry_run:
        print_message(f"{counts}. Nothing changed ({'--diff' if diff else '--dry-run'}).")
        raise click.exceptions.Exit(DIFFERENT if diff and plan else 0)
    if plan.delete and not confirm(f"Delete {', '.join(current['name'] for current in plan.delete)}?", yes=yes):
        raise click.exceptions.Exit(FAILED)
    total = changed + created + len(plan.delete)
    done = 0
    with status_line(
        lambda: f"{done} of {total} changes were made. Run the command again: it makes the others."
    ) as show:
        for done, make_change in enumerate(_changes(remote, plan)):
            show(f"Applying  {done} of {total}")
            make_change()
    print_message(f"{changed} changed, {created} created, {len(plan.delete)} deleted, {plan.unchanged} unchanged.")


def _changes(remote: ServerClient, plan: Plan) -> Iterator[Callable[[], None]]:
    """Yield a function for each change of a plan: targets first, because schedules use them."""
    by_name = "/schedules/by-name/"
    for body, _ in plan.targets:
        yield partial(_write_target, remote, body)
    for body in plan.create:
        yield partial(remote.request, "PUT", by_name + _quote_segment(body["name"]), body)
    for current, body, _ in plan.change:
        yield partial(remote.request, "PUT", by_name + _quote_segment(body["name"]), body, if_match=current["etag"])
    for current in plan.delete:
        yield partial(remote.request, "DELETE", f"/schedules/{current['id']}", if_match=current["etag"])


def _write_target(remote: ServerClient, body: Mapping[str, Any]) -> None:
    written = remote.request(
        "PUT", f"/targets/{_quote_segment(body['name'])}", {"kind": body["type"], "options": body["options"]}
    )
    if written["signingSecret"]:
        print_message(f"Signing secret of {body['name']}, shown only once: {written['signingSecret']}")


@click.command("export")
@click.option("--label", multiple=True, metavar="NAME=VALUE", help="Only schedules with this label.")
@click.option("--topic", help="Only schedules of this topic.")
def export(label: tuple[str, ...], topic: str | None) -> None:
    """Print targets and schedules in the format of apply, without schedules defined in code.

    Targets are omitted if --label or --topic is set. Secrets are never printed.
    """
    import yaml

    from timebell.cli.progress import status_line
    from timebell.cli.schedule import server_client

    remote = server_client()
    targets = [] if label or topic else [target_document(target) for target in remote.list_items("/targets")]
    bodies: list[dict[str, Any]] = []
    with status_line(lambda: "Nothing was printed, because the list is not complete.") as show:
        for schedule in remote.list_items("/schedules", {"label": label, "topic": topic}):
            show(f"Reading  {len(bodies):,} schedules")
            if schedule["source"] != "code":
                bodies.append(schedule_document(schedule))
    all_documents = [*targets, *sorted(bodies, key=lambda body: str(body["name"]))]
    print_data(yaml.safe_dump_all(all_documents, sort_keys=False, allow_unicode=True,
                            default_flow_style=None, width=110).rstrip())  # fmt: skip


def documents(path: Path, kinds: Sequence[str] = DOCUMENT_KINDS) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (kind, body) of every document in a file or folder. Raises InvalidInput with the file name."""
    from timebell.errors import InvalidInput

    if not path.is_dir():
        yield from _parse_file(path, kinds)
        return
    files = sorted(each for each in path.rglob("*") if each.suffix in FILE_SUFFIXES)
    if not files:
        raise InvalidInput(f"{path} contains no {', '.join(FILE_SUFFIXES)} files.", code="FILE_UNREADABLE")
    seen: dict[tuple[str, str], Path] = {}
    for each in files:
        for kind, body in _parse_file(each, kinds):
            if kind in DOCUMENT_KINDS and (other := seen.setdefault((kind, body["name"]), each)) != each:
                raise InvalidInput(f"{body['name']} is defined in both {other} and {each}.", code="DUPLICATE_SCHEDULE")
            yield kind, body


def _parse_file(path: Path, kinds: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    import yaml

    from timebell.cli.inputs import read_file_or_stdin
    from timebell.errors import InvalidInput

    try:
        parsed = list(yaml.load_all(read_file_or_stdin(str(path)), Loader=_yaml_loader(yaml)))
    except yaml.YAMLError as bad:
        raise InvalidInput(f"{path} is not valid YAML: {' '.join(str(bad).split())}", code="FILE_UNREADABLE") from bad
    for number, body in enumerate((document for document in parsed if document is not None), 1):
        where = f"{path}, document {number},"
        kind = body.pop("kind", "Schedule") if isinstance(body, dict) else None
        if kind not in kinds:
            raise InvalidInput(
                f"{where} has unknown kind {kind!r:.40}.", code="UNKNOWN_KIND", fix=f"Use {', '.join(kinds)}."
            )
        if kind in DOCUMENT_KINDS and not isinstance(body.get("name"), str):
            raise InvalidInput(
                f"{where} is a {str(kind).lower()} without a name.", code="NAME_MISSING",
                fix="A document has the fields of POST /schedules; timebell export prints examples.",
            )  # fmt: skip
        if kind == "Target" and (body.keys() != {"name", "type", "options"} or not isinstance(body["options"], dict)):
            raise InvalidInput(
                f"{where} is a target and must have exactly name, type and options.", code="INVALID_TARGET_OPTIONS",
                fix="E.g. kind: Target, name: orders, type: http, options: {url: https://...}.",
            )  # fmt: skip
        yield str(kind), {FIELD_ALIASES.get(str(name), str(name)): value for name, value in body.items()}


def _yaml_loader(yaml: Any) -> Any:
    """Return a YAML loader with the types of JSON: timestamps and words such as `on` stay text."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    dropped = {"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:bool"}
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in dropped]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("true|false"), list("tf"))
    return Loader


def plan_changes(remote: ServerClient, documents_read: list[tuple[str, dict[str, Any]]], *, prune: bool) -> Plan:
    """Compare files with the server, which validates every schedule first. Raises InvalidInput."""
    from timebell.errors import InvalidInput

    bodies = [body for kind, body in documents_read if kind == "Schedule"]
    current_by_name = {schedule["name"]: schedule for schedule in remote.list_items("/schedules")}
    plan = Plan()
    _plan_targets(remote, [body for kind, body in documents_read if kind == "Target"], plan)
    for body in bodies:
        try:
            remote.request("POST", "/schedules/preview", body, params={"count": 1})
        except InvalidInput as bad:
            bad.message = f"{body['name']}: {bad.message}"
            raise
        current = current_by_name.get(body["name"])
        if current is None:
            plan.create.append(body)
        elif lines := schedule_changes(remote, current, body):
            plan.change.append((current, body, lines))
        else:
            plan.unchanged += 1
    if prune:
        names_in_files = {body["name"] for body in bodies}
        plan.delete = [
            current for name, current in current_by_name.items()
            if name not in names_in_files and current["source"] != "code"
        ]  # fmt: skip
    return plan


def _plan_targets(remote: ServerClient, bodies: list[dict[str, Any]], plan: Plan) -> None:
    targets = remote.list_items("/targets") if bodies else []
    current_by_name = {target["name"]: target_document(target) for target in targets}
    for body in bodies:
        current = current_by_name.get(body["name"])
        if current is None:
            plan.targets.append((body, []))
        elif lines := _changed_fields(current, body, ("type",)) + _changed_fields(current["options"], body["options"]):
            plan.targets.append((body, lines))
        else:
            plan.unchanged += 1


def target_document(target: Mapping[str, Any]) -> dict[str, Any]:
    """Return a target of the API as a document of a file."""
    return {"kind": "Target", "name": target["name"], "type": target["kind"], "options": target["options"]}


def _changed_fields(
    old: Mapping[str, Any], new: Mapping[str, Any], field_names: Sequence[str] | None = None
) -> list[str]:
    """Return one line per field that differs."""
    return [f"{name}: {_format_value(old.get(name))} → {_format_value(new.get(name))}"
            for name in field_names or sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]  # fmt: skip


def schedule_changes(remote: ServerClient, old: Mapping[str, Any], body: Mapping[str, Any]) -> list[str]:
    """Return one line per field that `body` would change in a schedule; omitted fields mean their defaults."""
    new = remote.request("POST", "/schedules/preview", body, params={"count": 1})["schedule"]
    return _changed_fields(schedule_document(old), schedule_document(new))


def schedule_document(schedule: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schedule of the API as a document of a file, without fields the server adds and without defaults."""
    defaults: dict[str, Any] = {
        "timeoutSeconds": 3600.0, "overlapPolicy": "skip", "missedAfterSeconds": 60.0, "whenLate": "run",
        "toleranceSeconds": 1.0, "jitterSeconds": 0.0, "queue": "default", "priority": 0, "metadata": {}, "labels": {},
        "notify": [],
        "catchUp": {"policy": "latest", "window": 86400.0, "limit": 100, "pace": 0.0, "holdAbove": 1000},
        "maxRetries": 3, "dst": {"gap": "end", "fold": "first"} if schedule["cronExpression"] else
        {"gap": "shift", "fold": "first"}, "enabled": True,
        "retry": {"attempts": 4, "backoff": {"type": "exponential", "delay": 5.0, "max": 600.0, "jitter": 0.1}},
    }  # fmt: skip
    simple = any(schedule[name] is not None for name in ("cronExpression", "interval", "rrule", "dates"))
    dropped = {"recurrence"} if simple else set()
    if schedule["retry"] != {**defaults["retry"], "attempts": schedule["maxRetries"] + 1}:
        dropped.add("maxRetries")
    else:
        dropped.add("retry")
    return {
        name: schedule[name] for name in SCHEDULE_FIELDS
        if name not in dropped and schedule[name] is not None and schedule[name] != defaults.get(name)
    }  # fmt: skip


SCHEDULE_FIELDS = (
    "name", "description", "cronExpression", "interval", "rrule", "dates", "recurrence", "timezone", "dst", "calendar",
    "roll", "startAt", "endAt", "maxRuns", "topic", "payload", "target", "onUnhandled", "queue", "priority", "group",
    "condition", "unless",
    "maxRetries", "retry", "timeoutSeconds", "expiresAfterSeconds", "overlapPolicy", "catchUp", "missedAfterSeconds",
    "whenLate", "toleranceSeconds", "jitterSeconds", "notify", "enabled", "metadata", "labels",
)  # fmt: skip


def describe_plan(plan: Plan, *, prune: bool) -> Iterator[str]:
    """Yield the lines that show a plan: + create, ~ change, - delete."""
    for body, lines in plan.targets:
        yield f"{'~' if lines else '+'} target {body['name']}" + (
            "" if lines else f"  {_format_value(body['options'])}"
        )
        yield from (f"    {line}" for line in lines)
    for current, _, lines in plan.change:
        yield f"~ {current['name']}"
        yield from (f"    {line}" for line in lines)
    for body in plan.create:
        when = next((body[name] for name in ("cronExpression", "rrule", "interval", "dates") if name in body), "")
        yield f"+ {body['name']}  {_format_value(when)}  {body.get('timezone', '')}".rstrip()
    for current in plan.delete:
        yield f"- {current['name']}  {current['summary']}"


def _format_value(value: Any) -> str:
    from timebell.cli.inputs import shorten

    return "none" if value is None else shorten(value)


def _quote_segment(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")
