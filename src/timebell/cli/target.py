"""`timebell target ...` and `timebell secret ...`: named targets of a server, and the secrets they use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from timebell.cli.groups import Group
from timebell.cli.options import output_option, yes_option
from timebell.cli.output import FAILED
from timebell.cli.schedule import server_client
from timebell.cli.target_options import read_request_options, request_options

target = Group("Targets: named destinations of jobs.")
secret = Group("Secrets used by targets: stored encrypted, never shown.")
name_argument = click.argument("name", metavar="NAME", help="Name.")
signing_secret_file_option = click.option(
    "--signing-secret", metavar="FILE", help="File with a whsec_... secret to sign with; - for stdin."
)


@target.command()
@click.argument("name", metavar="NAME", help="Name that jobs and schedules refer to.")
@click.argument("where", metavar="URL|JSON", help='URL, or {"kind": ..., options}; @file reads a file.')
@click.option("--header", multiple=True, metavar="NAME=VALUE", help="Header to send; repeatable.")
@click.option(
    "--secret-header", multiple=True, metavar="NAME=SECRET", help="Header with the value of a secret; repeatable."
)
@request_options
@signing_secret_file_option
@click.option("--replace", is_flag=True, help="Replace an existing target.")
@output_option
def create(
    name: str,
    where: str,
    header: tuple[str, ...],
    secret_header: tuple[str, ...],
    signing_secret: str | None,
    replace: bool,
    output: str | None,
    **request_flags: Any,
) -> None:
    """Create a target and its signing secret, which is printed only once."""
    from timebell.cli.inputs import parse_pairs
    from timebell.cli.schedule import parse_target

    remote = server_client(output)
    options = dict(_require_object(parse_target(where)))
    headers: dict[str, Any] = dict(parse_pairs(header, "--header") or {})
    secret_headers = parse_pairs(secret_header, "--secret-header") or {}
    headers |= {name: {"secret": secret_name} for name, secret_name in secret_headers.items()}
    options |= read_request_options(request_flags)
    if headers:
        options["headers"] = {**options.get("headers", {}), **headers}
    body = {"kind": options.pop("kind", None), "options": options, "signingSecret": _read_secret_file(signing_secret)}
    body = {field: value for field, value in body.items() if value is not None}
    if replace:
        record = remote.request("PUT", f"/targets/{_quote_segment(name)}", body)
    else:
        record = remote.request("POST", "/targets", {"name": name, **body})
    _print_target(record, remote.settings.output)


@target.command("list")
@output_option
def list_(output: str | None) -> None:
    """List targets by name."""
    from timebell.cli.inputs import print_list, shorten

    remote = server_client(output)
    head = ("NAME", "KIND", "STATE", "OPTIONS")
    print_list(remote.list_items("/targets"), remote.settings.output, head, lambda row: (
        row["name"], row["kind"], _target_state(row), shorten(row["options"].get("url") or row["options"]),
    ))  # fmt: skip


@target.command()
@name_argument
@output_option
def show(name: str, output: str | None) -> None:
    """Show a target."""
    remote = server_client(output)
    _print_target(remote.request("GET", f"/targets/{_quote_segment(name)}"), remote.settings.output)


@target.command("test")
@name_argument
@click.option("--payload", metavar="JSON", help="Payload of the event; @file reads a file.")
@output_option
def send_test(name: str, payload: str | None, output: str | None) -> None:
    """Send a test event; show the exact request and response. Exit 1 if it was not accepted."""
    from timebell.cli import output as out
    from timebell.cli.inputs import parse_json

    remote = server_client(output)
    body = None if payload is None else {"payload": parse_json(payload, "--payload")}
    result = remote.request("POST", f"/targets/{_quote_segment(name)}/test", body)
    if remote.settings.output != out.Format.TABLE:
        out.print_record(result, remote.settings.output)
    else:
        _print_test_result(name, result)
    if not result["delivered"]:
        raise click.exceptions.Exit(FAILED)


@target.command("rotate-secret")
@name_argument
@click.option(
    "--overlap",
    default="24h",
    show_default=True,
    metavar="D",
    help="How long the old secret also signs; 0: not at all.",
)
@signing_secret_file_option
@output_option
def rotate_secret(name: str, overlap: str, signing_secret: str | None, output: str | None) -> None:
    """Replace the signing secret and print the new one, only once."""
    from timebell.durations import parse_duration
    from timebell.errors import InvalidInput

    overlap_seconds = parse_duration(overlap)
    if overlap_seconds is None:
        raise InvalidInput(f"--overlap is {overlap!r:.40}.", code="INVALID_DURATION", fix="E.g. 24h, or 0.")
    remote = server_client(output)
    fields = {"overlapSeconds": overlap_seconds, "signingSecret": _read_secret_file(signing_secret)}
    body = {field: value for field, value in fields.items() if value is not None}
    _print_target(
        remote.request("POST", f"/targets/{_quote_segment(name)}/rotate-secret", body), remote.settings.output
    )


@target.command()
@name_argument
@output_option
def enable(name: str, output: str | None) -> None:
    """Re-enable a disabled target."""
    from timebell.cli.output import print_message

    remote = server_client(output)
    _print_target(remote.request("POST", f"/targets/{_quote_segment(name)}/enable"), remote.settings.output)
    print_message("Retry jobs that failed in the meantime: timebell dead retry --error TARGET_DISABLED")


@target.command()
@name_argument
@yes_option
def delete(name: str, yes: bool) -> None:
    """Delete a target that is not in use."""
    from timebell.cli.inputs import confirm
    from timebell.cli.output import print_message

    if not confirm(f"Delete target {name}?", yes=yes):
        raise click.exceptions.Exit(FAILED)
    server_client().request("DELETE", f"/targets/{_quote_segment(name)}")
    print_message("Deleted.")


@secret.command("set")
@name_argument
@click.option(
    "--from", "value_file", default="-", show_default=True, metavar="FILE", help="File with the value; - for stdin."
)
@output_option
def secret_set(name: str, value_file: str, output: str | None) -> None:
    """Create or replace a secret. Reads the value from stdin, without the final newline."""
    from timebell.cli.output import print_record
    from timebell.errors import NotFound

    remote, value = server_client(output), _read_secret_file(value_file)
    try:
        stored = remote.request("PUT", f"/secrets/{_quote_segment(name)}", {"value": value})
    except NotFound as missing:
        if missing.code != "SECRET_NOT_FOUND":
            raise
        stored = remote.request("POST", "/secrets", {"name": name, "value": value})
    print_record(stored, remote.settings.output)


@secret.command("list")
@output_option
def secret_list(output: str | None) -> None:
    """List secrets by name; values are never shown."""
    from timebell.cli.inputs import print_list

    remote = server_client(output)
    print_list(remote.list_items("/secrets"), remote.settings.output, ("NAME", "VERSION", "UPDATED"), lambda row: (
        row["name"], str(row["version"]), row["updatedAt"],
    ))  # fmt: skip


@secret.command("delete")
@name_argument
@yes_option
def secret_delete(name: str, yes: bool) -> None:
    """Delete a secret that no target uses."""
    from timebell.cli.inputs import confirm
    from timebell.cli.output import print_message

    if not confirm(f"Delete secret {name}?", yes=yes):
        raise click.exceptions.Exit(FAILED)
    server_client().request("DELETE", f"/secrets/{_quote_segment(name)}")
    print_message("Deleted.")


def _require_object(value: Any) -> Mapping[str, Any]:
    from timebell.errors import InvalidInput

    if not isinstance(value, Mapping):
        raise InvalidInput(
            f"{value!r:.60} is not a target.",
            code="UNKNOWN_TARGET_KIND",
            fix='Use a URL, or {"kind": "http", "url": ...}.',
        )
    return value


def _read_secret_file(path: str | None) -> str | None:
    """Return the text of a file, or of stdin for `-`, without the final newline. Raises InvalidInput."""
    from timebell.cli.inputs import read_file_or_stdin

    return None if path is None else read_file_or_stdin(path).decode("utf-8", "surrogateescape").rstrip("\r\n")


def _target_state(row: Mapping[str, Any]) -> str:
    return "disabled" if row["disabledAt"] else "ready"


def _print_target(record: Mapping[str, Any], output_format: str) -> None:
    import sys

    from timebell.cli.inputs import shorten
    from timebell.cli.output import Format, colorize, print_message, print_record
    from timebell.cli.output import print_data as line

    if output_format != Format.TABLE:
        print_record(record, output_format)
    else:
        line(f"{colorize(record['name'], 'bold', sys.stdout)}  {_target_state(record)}  revision {record['revision']}")
        old_until = [signing_secret["until"] for signing_secret in record["signing"] if signing_secret["until"]]
        facts = {
            "kind": record["kind"], **record["options"],
            "disabled": record["disabledAt"] and f"since {record['disabledAt']}: {record['disabledReason']}",
            "old secret": f"signs until {', '.join(old_until)}" if old_until else None,
            "secret": record.get("signingSecret"),
        }  # fmt: skip
        for name, value in facts.items():
            if value is not None:
                line(f"  {name:<12}{shorten(value, 100)}")
    if record.get("signingSecret"):
        print_message("The signing secret is shown only once: give it to the receiver.")


def _print_test_result(name: str, result: Mapping[str, Any]) -> None:
    import json
    import sys

    from timebell.cli.output import colorize
    from timebell.cli.output import print_data as line

    request, response = result["request"] or {}, result["response"]
    outcome = (
        colorize("delivered", "green", sys.stdout) if result["delivered"] else colorize("failed", "red", sys.stdout)
    )
    error = "" if result["errorCode"] is None else f"  {result['errorCode']}: {result['errorMessage']}"
    line(f"{name}  {outcome}  {result['latencyMs']:,} ms{error}")
    if request:
        line(f"> {request.get('method', '')} {request.get('url', '')}".rstrip())
        for header, value in request.get("headers", {}).items():
            line(f"> {header}: {value}")
        line(f">\n> {request.get('body', '')}")
    if isinstance(response, Mapping) and "status" in response:
        line(f"< {response['status']}")
        for header, value in response.get("headers", {}).items():
            line(f"< {header}: {value}")
        line(f"<\n< {response['body']}".rstrip())
    elif response is not None:
        line(f"< {json.dumps(response)}")


def _quote_segment(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")
