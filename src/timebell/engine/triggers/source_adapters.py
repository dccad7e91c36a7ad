"""The adapters of a node: one for each source that it reads, made anew when the source was edited."""

from __future__ import annotations

from datetime import datetime

from timebell.engine.node import Node
from timebell.engine.triggers.connection_tokens import ConnectionToken, SecretToken
from timebell.model.connection import connection_of
from timebell.model.target import filled, secret_names, secret_of
from timebell.model.trigger import Source
from timebell.store.tenancy import secrets
from timebell.tenancy.secrets import keyring
from timebell.triggers import adapter
from timebell.triggers.base import Adapter, Token


class Adapters:
    """Made when first asked for."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._made: dict[str, tuple[datetime, Adapter]] = {}
        self._renewing: dict[str, ConnectionToken] = {}

    async def of(self, source: Source) -> Adapter:
        """What reads a source. Raises InvalidInput, NotFound (SECRET_NOT_FOUND), Refused, StoreError."""
        if (known := self._known(source)) is not None:
            return known
        await self.forget(source.id)
        options = dict(source.options)
        if connection_of(options.get("token")) is not None or secret_of(options.get("token")) is not None:
            del options["token"]  # it is asked for each time
        names = secret_names(options)
        if names:
            ring = keyring(self.node.secret_key)
            options = filled(options, await self.node.store.run(secrets.values, ring, source.tenant_id, names))
        if (known := self._known(source)) is not None:  # who asked meanwhile has made one
            return known
        made = adapter(source.kind, options, self._token(source))
        self._made[source.id] = source.updated_at, made
        return made

    def _known(self, source: Source) -> Adapter | None:
        known = self._made.get(source.id)
        return known[1] if known is not None and known[0] == source.updated_at else None

    def _token(self, source: Source) -> Token | None:
        """What gives the token for each question, where that may change from one to the next."""
        given = source.options.get("token")
        if (connection := connection_of(given)) is not None:
            self._renewing[source.id] = ConnectionToken(self.node, source.tenant_id, connection)
            return self._renewing[source.id]
        if (secret := secret_of(given)) is not None:
            return SecretToken(self.node, source, secret)
        return None

    async def forget(self, source_id: str) -> None:
        """Let go of one."""
        if (token := self._renewing.pop(source_id, None)) is not None:
            await token.close()
        known = self._made.pop(source_id, None)
        if known is not None:
            await known[1].close()

    async def close(self) -> None:
        """Let go of all."""
        for source_id in list(self._made):
            await self.forget(source_id)
