"""Options of `timebell target create` for the request of an http target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

_OPTIONS = (
    click.option("--method", metavar="M", help="GET, PUT, ...  [default: POST]"),
    click.option("--query", multiple=True, metavar="NAME=VALUE", help="Query parameter; repeatable."),
    click.option("--text", metavar="TEXT", help="Body as text, with placeholders; @file reads a file."),
    click.option("--form", multiple=True, metavar="NAME=VALUE", help="Field of a form as body; repeatable."),
    click.option("--template", metavar="JSON", help="Body as JSON, with placeholders; @file reads a file."),
    click.option("--content-type", metavar="TYPE", help="Media type of the body."),
    click.option("--unsigned", is_flag=True, help="Omit the headers of a webhook."),
    click.option("--timeout", metavar="D", help="Limit of a request, up to 30m."),
    click.option("--success", metavar="LIST", help="Accepted statuses, such as 200,404,3xx.  [default: 2xx]"),
    click.option("--contains", metavar="TEXT", help="Text that the response body must contain."),
    click.option("--follow-redirects", is_flag=True, help="Follow up to five redirects."),
    click.option("--bearer", metavar="SECRET", help="Secret with a token to authenticate with."),
    click.option("--basic", metavar="USER=SECRET", help="User, and secret with the password, to authenticate with."),
    click.option("--ca", type=click.Path(path_type=Path), help="File with certificates of authorities to trust."),
    click.option("--certificate", type=click.Path(path_type=Path), help="File with a client certificate."),
    click.option("--key", metavar="SECRET", help="Secret with the key of the client certificate."),
    click.option("--proxy", metavar="URL", help="HTTP proxy, http://host:port."),
    click.option("--concurrency", type=int, help="Maximum number of simultaneous requests."),
    click.option("--rate", metavar="N/D", help="Maximum number of requests in a time, such as 10/1s."),
)


def request_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a request to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_request_options(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the target that these flags set. Raises InvalidInput."""
    from timebell.cli.inputs import parse_json, parse_pairs

    options = {
        "method": flags["method"] and flags["method"].upper(), "query": parse_pairs(flags["query"], "--query"),
        "contentType": flags["content_type"],
        "timeout": flags["timeout"], "success": _parse_statuses(flags["success"]),
        "expect": flags["contains"] and {"contains": flags["contains"]},
        "followRedirects": flags["follow_redirects"] or None, "auth": _read_auth(flags),
        "tls": _read_tls(flags) or None, "proxy": flags["proxy"] and {"url": flags["proxy"]},
        "concurrency": flags["concurrency"],
    }  # fmt: skip
    bodies = {
        "text": flags["text"] and _read_text(flags["text"]), "form": parse_pairs(flags["form"], "--form"),
        "template": parse_json(flags["template"], "--template"),
    }  # fmt: skip
    for kind, template in bodies.items():
        if template:
            options |= {"body": kind, "template": template}
    return (
        {name: value for name, value in options.items() if value}
        | ({"signed": False} if flags["unsigned"] else {})
        | _parse_rate(flags["rate"])
    )


def _parse_statuses(text: str | None) -> list[int | str]:
    return [int(each) if each.isdigit() else each for each in (text or "").replace(" ", "").split(",") if each]


def _parse_rate(text: str | None) -> dict[str, Any]:
    """Parse `10/1s`. Raises InvalidInput (INVALID_RATE)."""
    from timebell.durations import parse_duration
    from timebell.errors import InvalidInput

    if text is None:
        return {}
    count, _, duration = text.partition("/")
    seconds = parse_duration(duration or "1s")
    if not count.isdigit() or not seconds:
        raise InvalidInput(f"--rate is {text!r:.40}.", code="INVALID_RATE", fix="E.g. 10/1s, or 100/1m.")
    return {"rate": int(count), "perSeconds": seconds}


def _read_auth(flags: Mapping[str, Any]) -> dict[str, Any] | None:
    from timebell.cli.inputs import parse_pairs

    if flags["bearer"] is not None:
        return {"type": "bearer", "token": {"secret": flags["bearer"]}}
    if flags["basic"] is None:
        return None
    ((user, secret),) = (parse_pairs((flags["basic"],), "--basic") or {}).items()
    return {"type": "basic", "username": user, "password": {"secret": secret}}


def _read_tls(flags: Mapping[str, Any]) -> dict[str, Any]:
    from timebell.cli.inputs import read_file_or_stdin

    tls: dict[str, Any] = {
        name: read_file_or_stdin(str(flags[name])).decode("utf-8", "replace")
        for name in ("ca", "certificate")
        if flags[name] is not None
    }
    return tls | ({"key": {"secret": flags["key"]}} if flags["key"] is not None else {})


def _read_text(text: str) -> str:
    from timebell.cli.inputs import read_file_or_stdin

    return read_file_or_stdin(text[1:]).decode("utf-8", "replace") if text.startswith("@") else text
