"""`timebell apply` and `export`: schedules and targets as files, for review and for git."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from timebell.cli import click_signatures
from timebell.cli.output import DIFFERENT, FAILED, say, show

if TYPE_CHECKING:
    from timebell.cli.remote import Remote

# What a file says in one way only, though the API understands two.
ALIASES = {"jobType": "topic", "jobPayload": "payload"}
KINDS = ("Schedule", "Target")
SUFFIXES = (".yaml", ".yml", ".json")


@dataclass
class Plan:
    """What would change."""

    targets: list[tuple[dict[str, Any], list[str]]] = field(default_factory=list)
    """Bodies of targets to be put, and what is different; nothing of those that are new."""
    create: list[dict[str, Any]] = field(default_factory=list)
    change: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = field(default_factory=list)
    delete: list[dict[str, Any]] = field(default_factory=list)
    same: int = 0

    def __bool__(self) -> bool:
        return bool(self.targets or self.create or self.change or self.delete)


def apply_(
    file: Annotated[
        Path, click_signatures.Option("--file", "-f", help="A YAML or JSON file, or a folder of them; - for stdin.")
    ],
    diff: Annotated[
        bool, click_signatures.Option("--diff", help="Only show what differs; exit 7 if anything.")
    ] = False,
    dry_run: Annotated[bool, click_signatures.Option("--dry-run", help="Only show what would be done.")] = False,
    prune: Annotated[
        bool, click_signatures.Option("--prune", help="Delete schedules that no file has; none of code.")
    ] = False,
    yes: Annotated[bool, click_signatures.Option("--yes", "-y", help="Do not ask before deleting.")] = False,
) -> None:
    """Make schedules and targets what files say. Each schedule is checked before anything is written."""
    from timebell.cli.inputs import confirmed
    from timebell.cli.schedule import remote_of

    remote = remote_of()
    plan = planned(remote, list(documents(file)), prune=prune)
    for line in told(plan, prune=prune):
        show(line)
    changed = len(plan.change) + sum(bool(lines) for _, lines in plan.targets)
    created = len(plan.create) + sum(not lines for _, lines in plan.targets)
    counts = f"{changed} to change, {created} to create, {len(plan.delete)} to delete"
    if diff or dry_run:
        say(f"{counts}. Nothing done ({'--diff' if diff else '--dry-run'}).")
        raise click_signatures.Exit(DIFFERENT if diff and plan else 0)
    if plan.delete and not confirmed(f"Delete {', '.join(one['name'] for one in plan.delete)}?", yes=yes):
        raise click_signatures.Exit(FAILED)
    for body, _ in plan.targets:
        made = remote.ask(
            "PUT", f"/targets/{_quoted(body['name'])}", {"kind": body["type"], "options": body["options"]}
        )
        if made["signingSecret"]:
            say(f"The signing secret of {body['name']}, shown this once: {made['signingSecret']}")
    for body in plan.create:
        remote.ask("PUT", f"/schedules/by-name/{_quoted(body['name'])}", body)
    for old, body, _ in plan.change:
        remote.ask("PUT", f"/schedules/by-name/{_quoted(body['name'])}", body, match=f'"{old["revision"]}"')
    for old in plan.delete:
        remote.ask("DELETE", f"/schedules/{old['id']}", match=f'"{old["revision"]}"')
    say(f"{changed} changed, {created} created, {len(plan.delete)} deleted, {plan.same} as they were.")


def export(
    label: Annotated[
        list[str] | None, click_signatures.Option(metavar="NAME=VALUE", help="Only those with it.")
    ] = None,
    topic: Annotated[str | None, click_signatures.Option(help="Only of this topic.")] = None,
) -> None:
    """Print targets and schedules as apply reads them. Schedules of code are left out: their code says what they are.

    Without targets if only some schedules are asked for; secrets are never printed."""
    import yaml

    from timebell.cli.schedule import remote_of

    remote = remote_of()
    where = [] if label or topic else [target_of(one) for one in remote.pages("/targets")]
    bodies = [body_of(one) for one in remote.pages("/schedules", {"label": label, "topic": topic})
              if one["source"] != "code"]  # fmt: skip
    found = [*where, *sorted(bodies, key=lambda one: str(one["name"]))]
    show(yaml.safe_dump_all(found, sort_keys=False, allow_unicode=True,
                            default_flow_style=None, width=110).rstrip())  # fmt: skip


def documents(path: Path, kinds: Sequence[str] = KINDS) -> Iterator[tuple[str, dict[str, Any]]]:
    """(kind, body) of every document in a file or folder. Raises InvalidInput, naming the file."""
    from timebell.errors import InvalidInput

    if not path.is_dir():
        yield from _read(path, kinds)
        return
    files = sorted(each for each in path.rglob("*") if each.suffix in SUFFIXES)
    if not files:
        raise InvalidInput(f"{path} has no {', '.join(SUFFIXES)} files.", code="FILE_UNREADABLE")
    seen: dict[tuple[str, str], Path] = {}
    for each in files:
        for kind, body in _read(each, kinds):
            if kind in KINDS and (other := seen.setdefault((kind, body["name"]), each)) != each:
                raise InvalidInput(f"{body['name']} is in {other} and in {each}.", code="SCHEDULE_TWICE")
            yield kind, body


def _read(path: Path, kinds: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    import yaml

    from timebell.cli.inputs import contents
    from timebell.errors import InvalidInput

    try:
        found = list(yaml.load_all(contents(str(path)), Loader=_Loader(yaml)))
    except yaml.YAMLError as bad:
        raise InvalidInput(f"{path} is not YAML: {' '.join(str(bad).split())}", code="FILE_UNREADABLE") from bad
    for number, body in enumerate((one for one in found if one is not None), 1):
        where = f"{path}, document {number},"
        kind = body.pop("kind", "Schedule") if isinstance(body, dict) else None
        if kind not in kinds:
            raise InvalidInput(f"{where} is of kind {kind!r:.40}.", code="KIND_UNKNOWN", fix=f"Use {', '.join(kinds)}.")
        if kind in KINDS and not isinstance(body.get("name"), str):
            raise InvalidInput(
                f"{where} is a {str(kind).lower()} without a name.", code="NAME_MISSING",
                fix="Each document has the fields of POST /schedules; timebell export shows how.",
            )  # fmt: skip
        if kind == "Target" and (body.keys() != {"name", "type", "options"} or not isinstance(body["options"], dict)):
            raise InvalidInput(
                f"{where} is a target, which has name, type and options.", code="TARGET_OPTIONS_INVALID",
                fix="E.g. kind: Target, name: orders, type: http, options: {url: https://...}.",
            )  # fmt: skip
        yield str(kind), {ALIASES.get(str(name), str(name)): value for name, value in body.items()}


def _Loader(yaml: Any) -> Any:  # noqa: N802 - a class, made when yaml is there
    """YAML as JSON has it: times and words such as `on` stay text."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    dropped = {"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:bool"}
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in dropped]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("true|false"), list("tf"))
    return Loader


def planned(remote: Remote, found: list[tuple[str, dict[str, Any]]], *, prune: bool) -> Plan:
    """What differs between files and server. Every schedule is checked by the server first. Raises InvalidInput."""
    from timebell.errors import InvalidInput

    bodies = [body for kind, body in found if kind == "Schedule"]
    there = {one["name"]: one for one in remote.pages("/schedules")}
    plan = Plan()
    _plan_targets(remote, [body for kind, body in found if kind == "Target"], plan)
    for body in bodies:
        try:
            remote.ask("POST", "/schedules/preview", body, params={"count": 1})
        except InvalidInput as bad:
            bad.message = f"{body['name']}: {bad.message}"
            raise
        old = there.get(body["name"])
        if old is None:
            plan.create.append(body)
        elif lines := differences(remote, old, body):
            plan.change.append((old, body, lines))
        else:
            plan.same += 1
    if prune:
        named = {body["name"] for body in bodies}
        plan.delete = [one for name, one in there.items() if name not in named and one["source"] != "code"]
    return plan


def _plan_targets(remote: Remote, bodies: list[dict[str, Any]], plan: Plan) -> None:
    there = {one["name"]: target_of(one) for one in remote.pages("/targets")} if bodies else {}
    for body in bodies:
        old = there.get(body["name"])
        if old is None:
            plan.targets.append((body, []))
        elif lines := _different(old, body, ("type",)) + _different(old["options"], body["options"]):
            plan.targets.append((body, lines))
        else:
            plan.same += 1


def target_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """What makes this target, as a document."""
    return {"kind": "Target", "name": found["name"], "type": found["kind"], "options": found["options"]}


def _different(old: Mapping[str, Any], new: Mapping[str, Any], names: Sequence[str] | None = None) -> list[str]:
    """Field by field, what is not the same."""
    return [f"{name}: {_short(old.get(name))} → {_short(new.get(name))}"
            for name in names or sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]  # fmt: skip


def differences(remote: Remote, old: Mapping[str, Any], body: Mapping[str, Any]) -> list[str]:
    """Field by field, what a body would change of a schedule; what it leaves out is the default."""
    new = remote.ask("POST", "/schedules/preview", body, params={"count": 1})["schedule"]
    return _different(body_of(old), body_of(new))


def body_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """What makes this schedule: without what the server adds, and without defaults."""
    defaults: dict[str, Any] = {
        "timeoutSeconds": 3600.0, "overlapPolicy": "skip", "missedAfterSeconds": 60.0, "class": "state",
        "toleranceSeconds": 1.0, "jitterSeconds": 0.0, "queue": "default", "priority": 0, "metadata": {}, "labels": {},
        "notify": [],
        "catchUp": {"policy": "latest", "window": 86400.0, "limit": 100, "pace": 0.0, "holdAbove": 1000},
        "maxRetries": 3, "dst": {"gap": "end", "fold": "first"} if found["cronExpression"] else
        {"gap": "shift", "fold": "first"}, "enabled": True,
        "retry": {"attempts": 4, "backoff": {"type": "exponential", "delay": 5.0, "max": 600.0, "jitter": 0.1}},
    }  # fmt: skip
    simple = any(found[name] is not None for name in ("cronExpression", "interval", "rrule", "dates"))
    dropped = {"recurrence"} if simple else set()
    if found["retry"] != {**defaults["retry"], "attempts": found["maxRetries"] + 1}:
        dropped.add("maxRetries")
    else:
        dropped.add("retry")
    return {
        name: found[name] for name in FIELDS
        if name not in dropped and found[name] is not None and found[name] != defaults.get(name)
    }  # fmt: skip


FIELDS = (
    "name", "description", "cronExpression", "interval", "rrule", "dates", "recurrence", "timezone", "dst", "calendar",
    "roll", "startAt", "endAt", "maxRuns", "topic", "payload", "target", "unheard", "queue", "priority", "group",
    "condition", "unless",
    "maxRetries", "retry", "timeoutSeconds", "expiresAfterSeconds", "overlapPolicy", "catchUp", "missedAfterSeconds",
    "class", "toleranceSeconds", "jitterSeconds", "notify", "enabled", "metadata", "labels",
)  # fmt: skip


def told(plan: Plan, *, prune: bool) -> Iterator[str]:
    """A plan, line by line."""
    for body, lines in plan.targets:
        yield f"{'~' if lines else '+'} target {body['name']}" + ("" if lines else f"  {_short(body['options'])}")
        yield from (f"    {line}" for line in lines)
    for old, _, lines in plan.change:
        yield f"~ {old['name']}"
        yield from (f"    {line}" for line in lines)
    for body in plan.create:
        when = next((body[name] for name in ("cronExpression", "rrule", "interval", "dates") if name in body), "")
        yield f"+ {body['name']}  {_short(when)}  {body.get('timezone', '')}".rstrip()
    for old in plan.delete:
        yield f"- {old['name']}  {old['summary']}"


def _short(value: Any) -> str:
    from timebell.cli.inputs import brief

    return "none" if value is None else brief(value)


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")
