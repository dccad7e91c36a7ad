"""The token of a connection, asked for before every question to a source, and renewed before it ends by one node.

Who renews has a lease in the connection's row; the others go on with the token there is, or wait for the new one if
that has ended, and read it again. A node that dies with the lease leaves the tokens as they were, and another renews
them when the lease is over.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from timebell.alarm import Alarm
from timebell.engine.node import Node
from timebell.errors import Refused, SourceFailed, StoreError
from timebell.model.connection import LOST, Connection, Tokens, is_refused
from timebell.model.trigger import UNAUTHORISED, Source
from timebell.store.tenancy import secrets
from timebell.store.triggers import connections
from timebell.tenancy.secrets import keyring

log = logging.getLogger("timebell.connections")

WITHIN = 10.0  # seconds for all that the token endpoint answers
LEASE = timedelta(seconds=15)
AGAIN = timedelta(seconds=30)
"""After a failure that may pass, nobody asks again before."""
LOOK = timedelta(seconds=0.1)
KEEP = timedelta(seconds=20)
"""So long new tokens are tried to be kept."""
MOST = 64 * 1024  # bytes of an answer
LONGEST = 32_768  # characters of a token


class ConnectionToken:
    """The token of a connection, as an adapter asks for it."""

    def __init__(self, node: Node, tenant_id: str, name: str) -> None:
        self.node = node
        self._of = tenant_id, name
        self._going: set[asyncio.Task[bool]] = set()

    async def __call__(self, refused: str | None = None) -> str:
        """As in Token. Raises NotFound (CONNECTION_NOT_FOUND), SourceFailed (SOURCE_UNAUTHORIZED), StoreError."""
        node = self.node
        ring = keyring(node.secret_key)
        give_up = node.clock.now() + LEASE + timedelta(seconds=WITHIN)
        done = False
        while True:
            seen, tokens = await node.store.run(connections.opened, ring, *self._of)
            now = node.clock.now()
            spent = refused is not None and tokens.access == refused
            if seen.unauthorised:
                raise _lost()
            if done or (not spent and not seen.near_end(now)):  # one that was just renewed is as good as they get
                return tokens.access
            if tokens.refresh is None and (spent or seen.over(now)):
                await node.store.run(connections.refused, seen, now)
                raise _lost()
            if tokens.refresh is None:
                return tokens.access
            if await node.store.run(connections.take, seen, now, LEASE):
                renewing = asyncio.create_task(self._renew(seen, tokens))
                self._going.add(renewing)
                renewing.add_done_callback(self._going.discard)
                # Who asked may give up: the tokens that come are kept all the same, as the old ones may be spent.
                done = await asyncio.shield(renewing)
                if not done:
                    return tokens.access  # it could not be renewed just now: the stored one, while it is taken
                continue  # read it again, as everyone does
            waiting = seen.fault is None and now < give_up and (spent or seen.over(now))
            if not waiting:
                return tokens.access
            await self._wait(LOOK)

    async def close(self) -> None:
        """Wait for what is being renewed."""
        await asyncio.gather(*self._going, return_exceptions=True)

    async def _keep(self, *operation: Any) -> None:
        """Run an operation of the store. The tokens in it are known here alone, and those before them may be worth
        nothing any more: while the store cannot serve, it is tried again."""
        clock = self.node.clock
        give_up = clock.now() + KEEP
        while True:
            try:
                await self.node.store.run(*operation)
                return
            except StoreError:
                if clock.now() >= give_up:
                    raise
            await self._wait(LOOK)

    async def _wait(self, span: timedelta) -> None:
        alarm = Alarm(self.node.clock)
        await alarm.wait(self.node.clock.now() + span)
        alarm.close()

    async def _renew(self, seen: Connection, tokens: Tokens) -> bool:
        """Ask for new tokens and keep them; False if that failed in a way that may pass. Raises SourceFailed."""
        node, ring = self.node, keyring(self.node.secret_key)
        count = node.counters.refreshes.add
        status, said = await _ask(seen, tokens)
        now = node.clock.now()
        given = _given(said) if status == 200 else None
        if given is not None:
            fresh = Tokens(access=given[0], refresh=given[1] or tokens.refresh, client_secret=tokens.client_secret)
            await self._keep(connections.renewed, ring, seen, fresh, _ends(given[2], now), now)
            count("ok")
            return True
        if is_refused(status, said):
            await node.store.run(connections.refused, seen, now)
            count("unauthorised")
            log.warning("connection %s: %s", seen.name, LOST)
            return True  # unless others were given meanwhile, reading it again says so
        why = f"The token could not be renewed: {f'HTTP {status}' if status else said}."
        await node.store.run(connections.failed, seen, why, now + AGAIN)
        count("failed")
        log.warning("connection %s: %s The stored one is used.", seen.name, why)
        return False


class SecretToken:
    """The token that is a secret; when it was refused, the secret is read again."""

    def __init__(self, node: Node, source: Source, name: str) -> None:
        self.node = node
        self._tenant_id, self._name = source.tenant_id, name
        self._known: str | None = None

    async def __call__(self, refused: str | None = None) -> str:
        """As in Token. Raises NotFound (SECRET_NOT_FOUND), Refused, StoreError."""
        if self._known is None or self._known == refused:
            ring = keyring(self.node.secret_key)
            found = await self.node.store.run(secrets.values, ring, self._tenant_id, {self._name})
            self._known = found[self._name]
        return self._known


async def _ask(seen: Connection, tokens: Tokens) -> tuple[int, Any]:
    """What the token endpoint says: a status and JSON; 0 and why if it says nothing (RFC 6749, section 6)."""
    try:
        from timebell import http_client
    except ImportError as missing:
        raise Refused(
            "Connections need the library h11.", code="EXTRA_MISSING", fix='Install it: pip install "timebell[server]"'
        ) from missing
    form = {
        "grant_type": "refresh_token", "refresh_token": tokens.refresh, "client_id": seen.client_id,
        "client_secret": tokens.client_secret,
    }  # fmt: skip
    body = urlencode({name: one for name, one in form.items() if one}).encode()
    headers = {"content-type": "application/x-www-form-urlencoded", "accept": "*/*"}
    try:
        answer = await http_client.ask("POST", seen.token_url, headers, body, within=WITHIN, most=MOST)
        return answer.status, json.loads(answer.body) if answer.body else {}
    except http_client.WireError as failed:
        return 0, type(failed).__name__
    except ValueError:  # a page of some proxy's
        return answer.status, None


def _given(said: Any) -> tuple[str, str | None, Any] | None:
    """Access token, refresh token and seconds that it lasts; None if there are none."""
    if not isinstance(said, Mapping):
        return None
    access, refresh = said.get("access_token"), said.get("refresh_token")
    if not isinstance(access, str) or not access or not access.isascii() or not access.isprintable():
        return None
    if len(access) > LONGEST or not (refresh is None or (isinstance(refresh, str) and 0 < len(refresh) <= LONGEST)):
        return None
    return access, refresh, said.get("expires_in")


def _ends(lasts: Any, now: datetime) -> datetime | None:
    try:
        return None if lasts is None else now + timedelta(seconds=max(0.0, float(lasts)))
    except (TypeError, ValueError, OverflowError):
        return None


def _lost() -> SourceFailed:
    return SourceFailed(LOST, code=UNAUTHORISED)
