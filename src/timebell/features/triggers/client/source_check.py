"""Checks of a source and its triggers against the database of the source, before they are stored."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from timebell.errors import InvalidInput, NotFound, Refused, SourceFailed
from timebell.features.triggers.model.trigger import Source
from timebell.features.triggers.sources.base import InvalidSourceQuery
from timebell.model.condition import query_parameters
from timebell.model.target import fill_secrets, secret_names
from timebell.store.dialects.base import Store
from timebell.store.tenancy import secrets
from timebell.tenancy.secrets import Keyring

if TYPE_CHECKING:
    from timebell.features.triggers.sources.sql_table import SqlTable

R = TypeVar("R")
CHECK_TIMEOUT_SECONDS = 3.0
QUERY_PARAMETERS = ("item", "recipient", "offset")


class SourceCheck:
    """Reads columns, and tries queries. A database that does not answer in time is not checked."""

    def __init__(self, store: Store, get_keyring: Callable[[], Keyring]) -> None:
        self._store = store
        self._get_keyring = get_keyring

    async def list_columns(self, source: Source) -> Collection[str]:
        """Return the columns of the rows of a source; empty if they are not known.

        Raises InvalidInput (INVALID_SOURCE_OPTIONS) if its table, query, key or cursor does not exist.
        """
        try:
            return await self._read(source, lambda table: table.list_columns()) or ()
        except InvalidSourceQuery as error:
            raise InvalidInput(error.message, code="INVALID_SOURCE_OPTIONS", fix=error.fix) from error

    async def check_query(self, source: Source, query: str, columns: Collection[str]) -> None:
        """Check a query and the names of its parameters. Raises InvalidInput (INVALID_CONDITION)."""
        names = query_parameters(query)
        for name in names:
            if columns and name not in columns and name not in QUERY_PARAMETERS:
                raise InvalidInput(
                    f"unless has the parameter :{name:.80}, which is not a column of the source.",
                    code="INVALID_CONDITION", fix=_suggest(name, {*columns, *QUERY_PARAMETERS}),
                )  # fmt: skip
        try:
            await self._read(source, lambda table: table.matches(query, dict.fromkeys(names)))
        except InvalidSourceQuery as error:
            raise InvalidInput(
                f"unless cannot be run. {error.message}", code="INVALID_CONDITION", fix=error.fix
            ) from error

    async def _read(self, source: Source, read: Callable[[SqlTable], Awaitable[R]]) -> R | None:
        """Read a source of kind sql; None if that is not possible now. Raises InvalidSourceQuery."""
        if source.kind != "sql":
            return None
        from timebell.features.triggers.sources.sql_table import SqlTable  # it loads drivers

        try:
            table = SqlTable(await self._fill(source))
            try:
                async with asyncio.timeout(CHECK_TIMEOUT_SECONDS):
                    return await read(table)
            finally:
                await table.close()
        except InvalidSourceQuery:
            raise
        except (TimeoutError, SourceFailed, NotFound, Refused):  # also a secret that does not exist yet
            return None

    async def _fill(self, source: Source) -> Mapping[str, Any]:
        """Return the options of a source with the values of its secrets."""
        names = secret_names(source.options)
        if not names:
            return source.options
        values = await self._store.run(secrets.decrypt_values, self._get_keyring(), source.tenant_id, names)
        filled: Mapping[str, Any] = fill_secrets(source.options, values)
        return filled


def check_column(option: str, column: str, known: Collection[str]) -> None:
    """Check that a column, or the first part of a path, is known. Raises InvalidInput (UNKNOWN_COLUMN)."""
    if column not in known and column.split(".")[0] not in known:
        raise InvalidInput(
            f"{option} is {column!r:.80}, which no row of the source has.", code="UNKNOWN_COLUMN",
            fix=_suggest(column, known),
        )  # fmt: skip


def _suggest(name: str, known: Collection[str]) -> str:
    nearest = difflib.get_close_matches(name, known, 1, 0.5)
    return f"Did you mean {nearest[0]}?" if nearest else f"The columns are {', '.join(sorted(known)[:20])}."
