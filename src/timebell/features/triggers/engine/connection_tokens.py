"""Provide the OAuth token of a connection before every request to a source; one node renews it before it expires.

The renewing node holds a lease in the connection's row. The other nodes continue with the stored token, or, if it has
expired, wait for the new one and read it again. If the renewing node dies, the tokens are unchanged, and another node
renews them after the lease has expired.
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
from timebell.features.triggers import metrics
from timebell.features.triggers.model.connection import (
    REAUTHORIZATION_MESSAGE,
    Connection,
    Tokens,
    is_permanent_refusal,
)
from timebell.features.triggers.model.trigger import SOURCE_UNAUTHORIZED, Source
from timebell.features.triggers.store import connections
from timebell.store.tenancy import secrets
from timebell.tenancy.secrets import keyring

log = logging.getLogger("timebell.connections")

TOKEN_ENDPOINT_TIMEOUT_SECONDS = 10.0  # for the whole response of the token endpoint
RENEWAL_LEASE = timedelta(seconds=15)
RENEWAL_RETRY_DELAY = timedelta(seconds=30)
"""Pause after a transient failure, for all nodes."""
POLL_INTERVAL = timedelta(seconds=0.1)
SAVE_TIMEOUT = timedelta(seconds=20)
"""How long to retry storing new tokens."""
MAX_RESPONSE_BYTES = 64 * 1024
MAX_TOKEN_LENGTH = 32_768  # characters


class ConnectionToken:
    """Token provider of a source adapter, for a token stored in a connection."""

    def __init__(self, node: Node, tenant_id: str, name: str) -> None:
        self.node = node
        self._key = tenant_id, name
        self._renewals: set[asyncio.Task[bool]] = set()

    async def __call__(self, rejected_token: str | None = None) -> str:
        """Return a valid token; a `rejected_token` is renewed first.

        Raises NotFound (CONNECTION_NOT_FOUND), SourceFailed (SOURCE_UNAUTHORIZED), StoreError.
        """
        node = self.node
        ring = keyring(node.secret_key)
        give_up_at = node.clock.now() + RENEWAL_LEASE + timedelta(seconds=TOKEN_ENDPOINT_TIMEOUT_SECONDS)
        renewed = False
        while True:
            connection, tokens = await node.store.run(connections.get_with_tokens, ring, *self._key)
            now = node.clock.now()
            is_rejected = rejected_token is not None and tokens.access == rejected_token
            if connection.unauthorized:
                raise _unauthorized_error()
            if renewed or (
                not is_rejected and not connection.needs_renewal(now)
            ):  # do not renew a token twice in one call
                return tokens.access
            if tokens.refresh is None and (is_rejected or connection.is_expired(now)):
                await node.store.run(connections.mark_unauthorized, connection, now)
                raise _unauthorized_error()
            if tokens.refresh is None:
                return tokens.access
            if await node.store.run(connections.acquire_renewal_lease, connection, now, RENEWAL_LEASE):
                renewal = asyncio.create_task(self._renew(connection, tokens))
                self._renewals.add(renewal)
                renewal.add_done_callback(self._renewals.discard)
                # Shielded: the new tokens must be stored even if the caller is cancelled; the old ones may be invalid.
                renewed = await asyncio.shield(renewal)
                if not renewed:
                    return tokens.access  # transient failure: try the stored token
                continue  # read the renewed token from the store
            must_wait = connection.error is None and now < give_up_at and (is_rejected or connection.is_expired(now))
            if not must_wait:
                return tokens.access
            await self._sleep(POLL_INTERVAL)

    async def close(self) -> None:
        """Wait for renewals in progress."""
        await asyncio.gather(*self._renewals, return_exceptions=True)

    async def _save(self, *operation: Any) -> None:
        """Run a store operation that writes new tokens; retry while the store is unreachable, up to `SAVE_TIMEOUT`.

        The new tokens exist only in this process, and the stored ones may already be invalid.
        """
        clock = self.node.clock
        give_up_at = clock.now() + SAVE_TIMEOUT
        while True:
            try:
                await self.node.store.run(*operation)
                return
            except StoreError:
                if clock.now() >= give_up_at:
                    raise
            await self._sleep(POLL_INTERVAL)

    async def _sleep(self, delay: timedelta) -> None:
        alarm = Alarm(self.node.clock)
        await alarm.wait(self.node.clock.now() + delay)
        alarm.close()

    async def _renew(self, connection: Connection, tokens: Tokens) -> bool:
        """Request new tokens and store them. Returns False after a transient failure."""
        node, ring = self.node, keyring(self.node.secret_key)
        count_refresh = node.counters.of_features[metrics.REFRESHES].add
        status, response = await _request_tokens(connection, tokens)
        now = node.clock.now()
        parsed = _parse_tokens(response) if status == 200 else None
        if parsed is not None:
            fresh = Tokens(access=parsed[0], refresh=parsed[1] or tokens.refresh, client_secret=tokens.client_secret)
            await self._save(connections.store_renewed_tokens, ring, connection, fresh, _expiry(parsed[2], now), now)
            count_refresh("ok")
            return True
        if is_permanent_refusal(status, response):
            await node.store.run(connections.mark_unauthorized, connection, now)
            count_refresh("unauthorized")
            log.warning("connection %s: %s", connection.name, REAUTHORIZATION_MESSAGE)
            return True  # the caller reads the connection again, which may have new tokens meanwhile
        error = f"The token could not be renewed: {f'HTTP {status}' if status else response}."
        await node.store.run(connections.record_renewal_failure, connection, error, now + RENEWAL_RETRY_DELAY)
        count_refresh("failed")
        log.warning("connection %s: %s Using the stored token.", connection.name, error)
        return False


class SecretToken:
    """Token provider of a source adapter, for a token stored as a secret; a rejected token is read again."""

    def __init__(self, node: Node, source: Source, name: str) -> None:
        self.node = node
        self._tenant_id, self._name = source.tenant_id, name
        self._value: str | None = None

    async def __call__(self, rejected_token: str | None = None) -> str:
        """Return the token. Raises NotFound (SECRET_NOT_FOUND), Refused, StoreError."""
        if self._value is None or self._value == rejected_token:
            ring = keyring(self.node.secret_key)
            values = await self.node.store.run(secrets.decrypt_values, ring, self._tenant_id, {self._name})
            self._value = values[self._name]
        return self._value


async def _request_tokens(connection: Connection, tokens: Tokens) -> tuple[int, Any]:
    """Refresh tokens at the token endpoint (RFC 6749, section 6).

    Returns the status and the JSON body (None if it is not JSON); or 0 and the name of the connection error. Raises
    Refused (EXTRA_MISSING).
    """
    try:
        from timebell import http_client
    except ImportError as error:
        raise Refused(
            "Connections require the library httptools.",
            code="EXTRA_MISSING",
            fix='Install it: pip install "timebell[server]"',
        ) from error
    form = {
        "grant_type": "refresh_token", "refresh_token": tokens.refresh, "client_id": connection.client_id,
        "client_secret": tokens.client_secret,
    }  # fmt: skip
    body = urlencode({name: value for name, value in form.items() if value}).encode()
    headers = {"content-type": "application/x-www-form-urlencoded", "accept": "*/*"}
    try:
        response = await http_client.send_request(
            "POST",
            connection.token_url,
            headers,
            body,
            timeout=TOKEN_ENDPOINT_TIMEOUT_SECONDS,
            max_bytes=MAX_RESPONSE_BYTES,
        )
        return response.status, json.loads(response.body) if response.body else {}
    except http_client.HttpClientError as error:
        return 0, type(error).__name__
    except ValueError:  # not JSON, perhaps an error page of a proxy
        return response.status, None


def _parse_tokens(response: Any) -> tuple[str, str | None, Any] | None:
    """Return access token, refresh token and lifetime (`expires_in`, unchecked); None if the response is invalid."""
    if not isinstance(response, Mapping):
        return None
    access, refresh = response.get("access_token"), response.get("refresh_token")
    if not isinstance(access, str) or not access or not access.isascii() or not access.isprintable():
        return None
    if len(access) > MAX_TOKEN_LENGTH or not (
        refresh is None or (isinstance(refresh, str) and 0 < len(refresh) <= MAX_TOKEN_LENGTH)
    ):
        return None
    return access, refresh, response.get("expires_in")


def _expiry(expires_in: Any, now: datetime) -> datetime | None:
    try:
        return None if expires_in is None else now + timedelta(seconds=max(0.0, float(expires_in)))
    except (TypeError, ValueError, OverflowError):
        return None


def _unauthorized_error() -> SourceFailed:
    return SourceFailed(REAUTHORIZATION_MESSAGE, code=SOURCE_UNAUTHORIZED)
