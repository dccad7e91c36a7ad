"""`timebell connection ...` and `timebell trigger reauthorize`: access tokens for sources, stored by a server."""

from __future__ import annotations

from typing import Any

import click

from timebell.cli.groups import Group
from timebell.cli.options import output_option, yes_option
from timebell.cli.output import FAILED
from timebell.cli.schedule import server_client
from timebell.features.triggers.cli.trigger import trigger

connection = Group("Connections: access tokens for sources.")
name_argument = click.argument("name", metavar="NAME", help="Connection name.")
token_file_option = click.option(
    "--from", "path", default="-", show_default=True, metavar="FILE", help="File with the tokens; - for stdin."
)


@connection.command()
@click.argument("name", metavar="NAME", help="Name that sources refer to.")
@token_file_option
@click.option("--token-url", metavar="URL", help="Endpoint that refreshes tokens.")
@click.option("--client-id", metavar="ID", help="OAuth client id.")
@output_option
def create(name: str, path: str, token_url: str | None, client_id: str | None, output: str | None) -> None:
    """Create a connection from the JSON of a token endpoint (client_secret allowed), or from a bare access token."""
    from timebell.cli.output import print_record

    remote = server_client(output)
    oauth_options = {"tokenUrl": token_url, "clientId": client_id}
    body = {
        "name": name,
        **_read_tokens(path),
        **{field: value for field, value in oauth_options.items() if value is not None},
    }
    print_record(remote.request("POST", "/connections", body), remote.settings.output)


@connection.command("list")
@output_option
def list_(output: str | None) -> None:
    """List connections by name; tokens are never shown."""
    from timebell.cli.inputs import print_list

    remote = server_client(output)
    head = ("NAME", "STATE", "EXPIRES", "ERROR")
    print_list(remote.list_items("/connections"), remote.settings.output, head, lambda row: (
        row["name"], row["state"], row["expiresAt"] or "", row["error"] or "",
    ))  # fmt: skip


@connection.command()
@name_argument
@token_file_option
@output_option
def reauthorize(name: str, path: str, output: str | None) -> None:
    """Replace the tokens of a connection; work that waited for them continues."""
    from timebell.cli.output import print_record

    remote = server_client(output)
    body = {field: value for field, value in _read_tokens(path).items() if field != "clientSecret"}
    print_record(
        remote.request("POST", f"/connections/{_quote_segment(name)}/reauthorize", body), remote.settings.output
    )


@connection.command()
@name_argument
@yes_option
def delete(name: str, yes: bool) -> None:
    """Delete a connection that no source uses, with its tokens."""
    from timebell.cli.inputs import confirm
    from timebell.cli.output import print_message

    if not confirm(f"Delete connection {name}?", yes=yes):
        raise click.exceptions.Exit(FAILED)
    server_client().request("DELETE", f"/connections/{_quote_segment(name)}")
    print_message("Deleted.")


@trigger.command("reauthorize")
@click.argument("name", metavar="NAME", help="Trigger that needs new tokens.")
@token_file_option
@output_option
def reauthorize_trigger(name: str, path: str, output: str | None) -> None:
    """Replace the tokens of the source of a trigger; work that waited for them continues."""
    from timebell.cli.output import print_message, print_record
    from timebell.errors import InvalidInput
    from timebell.features.triggers.model.connection import connection_name
    from timebell.model.target import referenced_secret

    remote = server_client(output)
    source = remote.request("GET", f"/triggers/{_quote_segment(name)}")["source"]
    token = remote.request("GET", f"/sources/{_quote_segment(source)}")["options"].get("token")
    if (credential := connection_name(token)) is not None:
        body = {field: value for field, value in _read_tokens(path).items() if field != "clientSecret"}
        updated = remote.request("POST", f"/connections/{_quote_segment(credential)}/reauthorize", body)
        print_message(f"Tokens of connection {credential} replaced.")
    elif (credential := referenced_secret(token)) is not None:
        updated = remote.request(
            "PUT", f"/secrets/{_quote_segment(credential)}", {"value": _read_tokens(path)["accessToken"]}
        )
        print_message(f"Value of secret {credential} replaced.")
    else:
        raise InvalidInput(
            f"Source {source} has no connection.", code="INVALID_CONNECTION",
            fix='Replace its options, with "token": {"connection": "name"}.',
        )  # fmt: skip
    print_record(updated, remote.settings.output)


_TOKEN_FIELDS = {
    "access_token": "accessToken", "refresh_token": "refreshToken", "expires_in": "expiresInSeconds",
    "client_secret": "clientSecret",
}  # fmt: skip


def _read_tokens(path: str) -> dict[str, Any]:
    """Read a token endpoint's response (RFC 6749, section 5.1) or a bare access token. Raises InvalidInput."""
    from timebell.cli.inputs import read_file_or_stdin
    from timebell.errors import InvalidInput
    from timebell.model.payload import read_json

    content = read_file_or_stdin(path).decode("utf-8", "surrogateescape").strip()
    if not content.startswith("{"):
        return {"accessToken": content}
    response = read_json(content.encode("utf-8", "surrogateescape"), "tokens")
    if not isinstance(response, dict) or "access_token" not in response:
        raise InvalidInput(
            "The input has no access_token.", code="INVALID_CONNECTION",
            fix='Use {"access_token": ..., "refresh_token": ..., "expires_in": ...}.',
        )  # fmt: skip
    return {
        _TOKEN_FIELDS[name]: value for name, value in response.items() if name in _TOKEN_FIELDS and value is not None
    }


def _quote_segment(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")
