"""Django: `INSTALLED_APPS = [..., "timebell.integrations.django"]`.

Settings of Django that count here: `TIMEBELL_APP` (`shop.bell:bell`), which `manage.py timebell run` runs, and
`TIMEBELL_DASHBOARD_URL`, to which the admin links.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from sqlalchemy import URL

from timebell.errors import InvalidInput
from timebell.targets.handler import Arrived

R = TypeVar("R")
KINDS = {"sqlite3": "sqlite", "postgresql": "postgresql", "postgis": "postgresql", "spatialite": "sqlite"}


def database_url(using: str = "default") -> str:
    """One of `DATABASES` as Timebell's address of it: `Timebell(database_url())` shares Django's database.

    Options of the driver are not taken over; an address with some is for TIMEBELL_DATABASE_URL. Raises InvalidInput
    (DATABASE_URL_INVALID) for SQLite in memory, and for what Timebell does not know.
    """
    from django.conf import settings

    its = settings.DATABASES[using]
    kind = KINDS.get(its["ENGINE"].rpartition(".")[2])
    name = str(its["NAME"])
    if kind is None or (kind == "sqlite" and (not name or ":memory:" in name or "mode=memory" in name)):
        raise InvalidInput(
            f"Django's database {using!r} ({its['ENGINE']}, {name!r:.60}) cannot be Timebell's.",
            code="DATABASE_URL_INVALID", fix="Use a file of SQLite or a PostgreSQL.",
        )  # fmt: skip
    if kind == "sqlite":
        return f"sqlite:///{Path(name).absolute()}"
    host = its.get("HOST") or None
    socket = {"host": host} if host and host.startswith("/") else {}
    url = URL.create(
        kind, its.get("USER") or None, its.get("PASSWORD") or None, None if socket else host,
        int(its["PORT"]) if its.get("PORT") else None, name, socket,
    )  # fmt: skip
    return url.render_as_string(hide_password=False)


def fresh_connections(handler: Callable[..., R]) -> Callable[..., R]:
    """Around a plain handler that uses the ORM: Django closes connections after each request, and a handler's thread
    serves none. Without it a connection that the database has ended stays, and every later job in the thread fails.
    """

    @functools.wraps(handler)
    def fresh(*event: Any, **named: Any) -> R:
        from django.db import close_old_connections

        close_old_connections()
        try:
            return handler(*event, **named)
        finally:
            close_old_connections()

    return fresh


@contextmanager
def completing(event: Arrived, using: str = "default") -> Iterator[None]:
    """`event.transaction()` for the ORM: `transaction.atomic` in which the job is completed.

    What a plain handler writes in the block, on that database of `DATABASES`, exists if and only if this attempt
    completed the job. Raises as `event.transaction` does; InvalidInput (CONNECTION_INVALID) if it is not Timebell's
    database; RuntimeError within another `atomic`, whose end would not be this one's.
    """
    from django.db import connections, transaction

    with event._completes().joined(
        lambda: event.result, connections[using], transaction.atomic(using=using, durable=True)
    ):
        yield


def dashboard_link(query: Callable[[Any], str], text: str = "jobs") -> Callable[[Any], str]:
    """A column for `list_display` or `readonly_fields` of a ModelAdmin: a link to an object's jobs in the dashboard.

    `query` says which, in the words of the dashboard's filter: `lambda order: f"owner:{order.customer_id}"`. Without
    the setting TIMEBELL_DASHBOARD_URL the column is empty.
    """

    def link(row: Any) -> str:
        from django.conf import settings
        from django.utils.html import format_html

        at = getattr(settings, "TIMEBELL_DASHBOARD_URL", None)
        if not at:
            return ""
        shown: str = format_html('<a href="{}jobs?q={}">{}</a>', _folder(at), quote(query(row)), text)
        return shown

    link.short_description = "Timebell"  # type: ignore[attr-defined]  # what Django's admin calls the column
    return link


def _folder(url: str) -> str:
    return url if url.endswith("/") else f"{url}/"
