"""`timebell connection ...` and `timebell trigger reauthorize`: tokens with which sources are read, of a server."""

from __future__ import annotations

from typing import Annotated, Any

from timebell.cli import click_signatures
from timebell.cli.output import FAILED
from timebell.cli.schedule import Output, Yes, remote_of
from timebell.cli.trigger import trigger

connection = click_signatures.Group("Connections: tokens with which sources are read.")
Named = Annotated[str, click_signatures.Argument(metavar="NAME", help="Its name.")]
From = Annotated[
    str, click_signatures.Option("--from", metavar="FILE", help="File with the tokens; - for stdin.")
]  # never in an argument, which everyone on the machine can read


@connection.command()
def add(
    name: Annotated[str, click_signatures.Argument(metavar="NAME", help="What sources will call it.")],
    given: From = "-",
    token_url: Annotated[str | None, click_signatures.Option(metavar="URL", help="Where tokens are renewed.")] = None,
    client_id: Annotated[str | None, click_signatures.Option(metavar="ID", help="Of the app.")] = None,
    output: Output = None,
) -> None:
    """Keep tokens under a name. Reads a token endpoint's JSON (also client_secret), or an access token alone."""
    from timebell.cli.output import emit_one

    remote = remote_of(output)
    more = {"tokenUrl": token_url, "clientId": client_id}
    body = {"name": name, **_tokens(given), **{field: value for field, value in more.items() if value is not None}}
    emit_one(remote.ask("POST", "/connections", body), remote.settings.output)


@connection.command("list")
def list_(output: Output = None) -> None:
    """List connections by name; their tokens are shown to nobody."""
    from timebell.cli.inputs import listed

    remote = remote_of(output)
    head = ("NAME", "STATE", "EXPIRES", "FAULT")
    listed(remote.pages("/connections"), remote.settings.output, head, lambda row: (
        row["name"], row["state"], row["expiresAt"] or "", row["fault"] or "",
    ))  # fmt: skip


@connection.command()
def reauthorize(name: Named, given: From = "-", output: Output = None) -> None:
    """Give one new tokens: what waited for them goes on."""
    from timebell.cli.output import emit_one

    remote = remote_of(output)
    body = {field: value for field, value in _tokens(given).items() if field != "clientSecret"}
    emit_one(remote.ask("POST", f"/connections/{_quoted(name)}/reauthorize", body), remote.settings.output)


@connection.command()
def delete(name: Named, yes: Yes = False) -> None:
    """Forget one that no source uses, and its tokens."""
    from timebell.cli.inputs import confirmed
    from timebell.cli.output import say

    if not confirmed(f"Delete the connection {name}?", yes=yes):
        raise click_signatures.Exit(FAILED)
    remote_of().ask("DELETE", f"/connections/{_quoted(name)}")
    say("Deleted.")


@trigger.command("reauthorize")
def reauthorize_trigger(
    name: Annotated[str, click_signatures.Argument(metavar="NAME", help="A trigger that needs new tokens.")],
    given: From = "-",
    output: Output = None,
) -> None:
    """Give the connection of a trigger's source new tokens: what waited for them goes on."""
    from timebell.cli.output import emit_one, say
    from timebell.errors import InvalidInput
    from timebell.model.connection import connection_of
    from timebell.model.target import secret_of

    remote = remote_of(output)
    source = remote.ask("GET", f"/triggers/{_quoted(name)}")["source"]
    token = remote.ask("GET", f"/sources/{_quoted(source)}")["options"].get("token")
    if (of := connection_of(token)) is not None:
        body = {field: value for field, value in _tokens(given).items() if field != "clientSecret"}
        made = remote.ask("POST", f"/connections/{_quoted(of)}/reauthorize", body)
        say(f"The connection {of} has new tokens.")
    elif (of := secret_of(token)) is not None:
        made = remote.ask("PUT", f"/secrets/{_quoted(of)}", {"value": _tokens(given)["accessToken"]})
        say(f"The secret {of} has a new value.")
    else:
        raise InvalidInput(
            f"The source {source} has no connection.", code="INVALID_CONNECTION",
            fix='Put it with "token": {"connection": "name"}.',
        )  # fmt: skip
    emit_one(made, remote.settings.output)


_FIELDS = {
    "access_token": "accessToken", "refresh_token": "refreshToken", "expires_in": "expiresInSeconds",
    "client_secret": "clientSecret",
}  # fmt: skip


def _tokens(path: str) -> dict[str, Any]:
    """What a token endpoint said (RFC 6749, section 5.1), or an access token. Raises InvalidInput."""
    from timebell.cli.inputs import contents
    from timebell.errors import InvalidInput
    from timebell.model.payload import read_json

    read = contents(path).decode("utf-8", "surrogateescape").strip()
    if not read.startswith("{"):
        return {"accessToken": read}
    said = read_json(read.encode("utf-8", "surrogateescape"), "tokens")
    if not isinstance(said, dict) or "access_token" not in said:
        raise InvalidInput(
            "There is no access_token.", code="INVALID_CONNECTION",
            fix='Give {"access_token": ..., "refresh_token": ..., "expires_in": ...}.',
        )  # fmt: skip
    return {_FIELDS[name]: value for name, value in said.items() if name in _FIELDS and value is not None}


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")
