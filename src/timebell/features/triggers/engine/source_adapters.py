"""Cache of source adapters: one per source that a node reads, replaced when the source is edited."""

from __future__ import annotations

from datetime import datetime

from timebell.engine.node import Node
from timebell.features.triggers.engine.call_budget import AccountBudget
from timebell.features.triggers.engine.connection_tokens import ConnectionToken, SecretToken
from timebell.features.triggers.model.connection import connection_name
from timebell.features.triggers.model.trigger import Source
from timebell.features.triggers.sources import create_adapter
from timebell.features.triggers.sources.base import SourceAdapter, TokenProvider
from timebell.model.target import fill_secrets, referenced_secret, secret_names
from timebell.store.tenancy import secrets
from timebell.tenancy.secrets import keyring


class AdapterCache:
    """Creates adapters on first use."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._adapters: dict[str, tuple[datetime, SourceAdapter]] = {}
        self._connection_tokens: dict[str, ConnectionToken] = {}

    async def get(self, source: Source) -> SourceAdapter:
        """Return the adapter of a source. Raises InvalidInput, NotFound (SECRET_NOT_FOUND), Refused, StoreError."""
        if (cached := self._cached(source)) is not None:
            return cached
        await self.discard(source.id)
        options = dict(source.options)
        if connection_name(options.get("token")) is not None or referenced_secret(options.get("token")) is not None:
            del options["token"]  # provided per request, by a TokenProvider
        names = secret_names(options)
        if names:
            ring = keyring(self.node.secret_key)
            options = fill_secrets(
                options, await self.node.store.run(secrets.decrypt_values, ring, source.tenant_id, names)
            )
        if (cached := self._cached(source)) is not None:  # created by a concurrent call
            return cached
        budget = AccountBudget(self.node, source) if source.kind == "monday" else None
        adapter = create_adapter(source.kind, options, self._token_for(source), budget)
        self._adapters[source.id] = source.updated_at, adapter
        return adapter

    def _cached(self, source: Source) -> SourceAdapter | None:
        entry = self._adapters.get(source.id)
        return entry[1] if entry is not None and entry[0] == source.updated_at else None

    def _token_for(self, source: Source) -> TokenProvider | None:
        """Return the token provider of a source whose token is stored in a connection or secret, otherwise None."""
        token = source.options.get("token")
        if (connection := connection_name(token)) is not None:
            self._connection_tokens[source.id] = ConnectionToken(self.node, source.tenant_id, connection)
            return self._connection_tokens[source.id]
        if (secret := referenced_secret(token)) is not None:
            return SecretToken(self.node, source, secret)
        return None

    async def discard(self, source_id: str) -> None:
        """Close the adapter of a source."""
        if (token := self._connection_tokens.pop(source_id, None)) is not None:
            await token.close()
        entry = self._adapters.pop(source_id, None)
        if entry is not None:
            await entry[1].close()

    async def close(self) -> None:
        """Close all adapters."""
        for source_id in list(self._adapters):
            await self.discard(source_id)
