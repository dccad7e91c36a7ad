"""`timebell target ...` and `timebell secret ...`: where jobs go, and what that needs, of a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from timebell.cli import click_signatures
from timebell.cli.output import FAILED
from timebell.cli.schedule import Output, Yes, remote_of

target = click_signatures.Group("Targets: where jobs go, under a name.")
secret = click_signatures.Group("Secrets that targets need: kept encrypted, never shown.")
Named = Annotated[str, click_signatures.Argument(metavar="NAME", help="Its name.")]
File = Annotated[
    str | None, click_signatures.Option(metavar="FILE", help="Sign with the whsec_... in it; - for stdin.")
]


@target.command()
def add(
    name: Annotated[str, click_signatures.Argument(metavar="NAME", help="What jobs and schedules will call it.")],
    where: Annotated[
        str, click_signatures.Argument(metavar="URL|JSON", help='A URL, or {"kind": ..., options}; @file.')
    ],
    header: Annotated[
        list[str] | None, click_signatures.Option(metavar="NAME=VALUE", help="Sent along; several.")
    ] = None,
    secret_header: Annotated[
        list[str] | None, click_signatures.Option(metavar="NAME=SECRET", help="The same, with the value of a secret.")
    ] = None,
    signing_secret: File = None,
    replace: Annotated[bool, click_signatures.Option("--replace", help="Change the one that there is.")] = False,
    output: Output = None,
) -> None:
    """Make a target. A signing secret is made too, and printed this once."""
    from timebell.cli.inputs import pairs
    from timebell.cli.schedule import target_of

    remote = remote_of(output)
    options = dict(_object(target_of(where)))
    headers: dict[str, Any] = dict(pairs(header, "--header") or {})
    headers |= {name: {"secret": of} for name, of in (pairs(secret_header, "--secret-header") or {}).items()}
    if headers:
        options["headers"] = {**options.get("headers", {}), **headers}
    body = {"kind": options.pop("kind", None), "options": options, "signingSecret": _from_file(signing_secret)}
    body = {field: value for field, value in body.items() if value is not None}
    if replace:
        made = remote.ask("PUT", f"/targets/{_quoted(name)}", body)
    else:
        made = remote.ask("POST", "/targets", {"name": name, **body})
    _show(made, remote.settings.output)


@target.command("list")
def list_(output: Output = None) -> None:
    """List targets by name."""
    from timebell.cli.inputs import brief, listed

    remote = remote_of(output)
    listed(remote.pages("/targets"), remote.settings.output, ("NAME", "KIND", "STATE", "OPTIONS"), lambda row: (
        row["name"], row["kind"], _state(row), brief(row["options"].get("url") or row["options"]),
    ))  # fmt: skip


@target.command()
def show(name: Named, output: Output = None) -> None:
    """Show one."""
    remote = remote_of(output)
    _show(remote.ask("GET", f"/targets/{_quoted(name)}"), remote.settings.output)


@target.command("test")
def try_(name: Named, output: Output = None) -> None:
    """Send a signed test event and show what went out and what came back; exit 1 if it was not taken."""
    from timebell.cli import output as out

    remote = remote_of(output)
    found = remote.ask("POST", f"/targets/{_quoted(name)}/test")
    if remote.settings.output != out.Format.TABLE:
        out.emit_one(found, remote.settings.output)
    else:
        _show_test(name, found)
    if not found["delivered"]:
        raise click_signatures.Exit(FAILED)


@target.command("rotate-secret")
def rotate_secret(
    name: Named,
    overlap: Annotated[
        str, click_signatures.Option(metavar="D", help="For so long the old one signs too, or 0.")
    ] = "24h",
    signing_secret: File = None,
    output: Output = None,
) -> None:
    """Give it a new signing secret, and print that this once."""
    from timebell.errors import InvalidInput
    from timebell.settings import duration

    lasts = duration(overlap)
    if lasts is None:
        raise InvalidInput(f"--overlap is {overlap!r:.40}.", code="INVALID_DURATION", fix="E.g. 24h, or 0.")
    remote = remote_of(output)
    given = {"overlapSeconds": lasts, "signingSecret": _from_file(signing_secret)}
    body = {field: value for field, value in given.items() if value is not None}
    _show(remote.ask("POST", f"/targets/{_quoted(name)}/rotate-secret", body), remote.settings.output)


@target.command()
def enable(name: Named, output: Output = None) -> None:
    """Deliver to it again, after it was disabled."""
    from timebell.cli.output import say

    remote = remote_of(output)
    _show(remote.ask("POST", f"/targets/{_quoted(name)}/enable"), remote.settings.output)
    say("Jobs that failed meanwhile: timebell dead replay --error TARGET_DISABLED")


@target.command()
def delete(name: Named, yes: Yes = False) -> None:
    """Forget one that nothing uses."""
    from timebell.cli.inputs import confirmed
    from timebell.cli.output import say

    if not confirmed(f"Delete the target {name}?", yes=yes):
        raise click_signatures.Exit(FAILED)
    remote_of().ask("DELETE", f"/targets/{_quoted(name)}")
    say("Deleted.")


@secret.command("set")
def secret_set(
    name: Named,
    value: Annotated[
        str, click_signatures.Option("--from", metavar="FILE", help="File with the value; - for stdin.")
    ] = "-",
    output: Output = None,
) -> None:
    """Keep a value under a name, or another one in its place. Reads it from stdin, without the line's end."""
    from timebell.cli.output import emit_one
    from timebell.errors import NotFound

    remote, given = remote_of(output), _from_file(value)
    try:
        kept = remote.ask("PUT", f"/secrets/{_quoted(name)}", {"value": given})
    except NotFound as missing:
        if missing.code != "SECRET_NOT_FOUND":
            raise
        kept = remote.ask("POST", "/secrets", {"name": name, "value": given})
    emit_one(kept, remote.settings.output)


@secret.command("list")
def secret_list(output: Output = None) -> None:
    """List secrets by name; their values are shown to nobody."""
    from timebell.cli.inputs import listed

    remote = remote_of(output)
    listed(remote.pages("/secrets"), remote.settings.output, ("NAME", "VERSION", "UPDATED"), lambda row: (
        row["name"], str(row["version"]), row["updatedAt"],
    ))  # fmt: skip


@secret.command("delete")
def secret_delete(name: Named, yes: Yes = False) -> None:
    """Forget one that no target refers to."""
    from timebell.cli.inputs import confirmed
    from timebell.cli.output import say

    if not confirmed(f"Delete the secret {name}?", yes=yes):
        raise click_signatures.Exit(FAILED)
    remote_of().ask("DELETE", f"/secrets/{_quoted(name)}")
    say("Deleted.")


def _object(given: Any) -> Mapping[str, Any]:
    from timebell.errors import InvalidInput

    if not isinstance(given, Mapping):
        raise InvalidInput(
            f"{given!r:.60} is no target.", code="TARGET_UNKNOWN", fix='Give a URL, or {"kind": "http", "url": ...}.'
        )
    return given


def _from_file(path: str | None) -> str | None:
    """The text of a file, or of stdin, without its line's end. Raises InvalidInput."""
    from timebell.cli.inputs import contents

    return None if path is None else contents(path).decode("utf-8", "surrogateescape").rstrip("\r\n")


def _state(row: Mapping[str, Any]) -> str:
    return "disabled" if row["disabledAt"] else "ready"


def _show(found: Mapping[str, Any], form: str) -> None:
    import sys

    from timebell.cli.inputs import brief
    from timebell.cli.output import Format, emit_one, paint, say
    from timebell.cli.output import show as line

    if form != Format.TABLE:
        emit_one(found, form)
    else:
        line(f"{paint(found['name'], 'bold', sys.stdout)}  {_state(found)}  revision {found['revision']}")
        ends = [one["until"] for one in found["signing"] if one["until"]]
        facts = {
            "kind": found["kind"], **found["options"],
            "disabled": found["disabledAt"] and f"since {found['disabledAt']}: {found['disabledReason']}",
            "old secret": f"signs until {', '.join(ends)}" if ends else None,
            "secret": found.get("signingSecret"),
        }  # fmt: skip
        for name, value in facts.items():
            if value is not None:
                line(f"  {name:<12}{brief(value, 100)}")
    if found.get("signingSecret"):
        say("The signing secret is shown this once: give it to the receiver.")


def _show_test(name: str, found: Mapping[str, Any]) -> None:
    import json
    import sys

    from timebell.cli.output import paint
    from timebell.cli.output import show as line

    sent, back = found["request"] or {}, found["response"]
    word = paint("delivered", "green", sys.stdout) if found["delivered"] else paint("failed", "red", sys.stdout)
    said = "" if found["errorCode"] is None else f"  {found['errorCode']}: {found['errorMessage']}"
    line(f"{name}  {word}  {found['latencyMs']:,} ms{said}")
    if sent:
        line(f"> {sent.get('method', '')} {sent.get('url', '')}".rstrip())
        for header, value in sent.get("headers", {}).items():
            line(f"> {header}: {value}")
        line(f">\n> {sent.get('body', '')}")
    if isinstance(back, Mapping) and "status" in back:
        line(f"< {back['status']}\n< {back['body']}".rstrip())
    elif back is not None:
        line(f"< {json.dumps(back)}")


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")
