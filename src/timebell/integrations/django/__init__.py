"""Django: `INSTALLED_APPS = [..., "timebell.integrations.django"]`.

Django settings: `TIMEBELL_APP` (`shop.bell:bell`) is the app that `manage.py timebell run` runs, and
`TIMEBELL_DASHBOARD_URL` the dashboard that the admin links to.
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
from timebell.targets.arrived import Arrived

R = TypeVar("R")
URL_SCHEMES = {"sqlite3": "sqlite", "postgresql": "postgresql", "postgis": "postgresql", "spatialite": "sqlite"}


def database_url(using: str = "default") -> str:
    """Return the Timebell URL of an entry of `DATABASES`: `Timebell(database_url())` shares Django's database.

    Driver options are not included; set TIMEBELL_DATABASE_URL if you need them. Raises InvalidInput
    (INVALID_DATABASE_URL) for SQLite in memory and for unsupported databases.
    """
    from django.conf import settings

    config = settings.DATABASES[using]
    kind = URL_SCHEMES.get(config["ENGINE"].rpartition(".")[2])
    name = str(config["NAME"])
    if kind is None or (kind == "sqlite" and (not name or ":memory:" in name or "mode=memory" in name)):
        raise InvalidInput(
            f"Timebell cannot use Django's database {using!r} ({config['ENGINE']}, {name!r:.60}).",
            code="INVALID_DATABASE_URL", fix="Use PostgreSQL or an SQLite file.",
        )  # fmt: skip
    if kind == "sqlite":
        return f"sqlite:///{Path(name).absolute()}"
    host = config.get("HOST") or None
    socket = {"host": host} if host and host.startswith("/") else {}
    url = URL.create(
        kind, config.get("USER") or None, config.get("PASSWORD") or None, None if socket else host,
        int(config["PORT"]) if config.get("PORT") else None, name, socket,
    )  # fmt: skip
    return url.render_as_string(hide_password=False)


def fresh_connections(handler: Callable[..., R]) -> Callable[..., R]:
    """Decorate a sync handler that uses the ORM to close stale Django connections before and after it.

    Django does so only around requests, and the thread of a handler serves none: a connection closed by the database
    would stay in use, and every later job in the thread would fail.
    """

    @functools.wraps(handler)
    def wrapper(*args: Any, **kwargs: Any) -> R:
        _close_stale_connections()
        try:
            return handler(*args, **kwargs)
        finally:
            _close_stale_connections()

    return wrapper


def _close_stale_connections() -> None:
    """Do the same as Django's `close_old_connections`, except to the open transaction of a TestCase."""
    from django.db import connections

    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close_if_unusable_or_obsolete()


@contextmanager
def completing(event: Arrived, using: str = "default") -> Iterator[None]:
    """`event.transaction()` for the ORM: a `transaction.atomic` block that also completes the job.

    Writes of a sync handler in the block, to this entry of `DATABASES`, are committed if and only if this attempt
    completes the job. Raises the errors of `event.transaction`; InvalidInput (INVALID_CONNECTION) if it is not
    Timebell's database; RuntimeError within another `atomic` block, whose commit would happen later.
    """
    from django.db import connections, transaction

    with event._require_exclusive_attempt().join_transaction(
        lambda: event.result, connections[using], transaction.atomic(using=using, durable=True)
    ):
        yield


def dashboard_link(query: Callable[[Any], str], text: str = "jobs") -> Callable[[Any], str]:
    """Return a column for `list_display` or `readonly_fields` of a ModelAdmin that links to an object's jobs.

    `query` returns the dashboard filter for an object: `lambda order: f"owner:{order.customer_id}"`. The column is
    empty without the setting TIMEBELL_DASHBOARD_URL.
    """

    def link(row: Any) -> str:
        from django.conf import settings
        from django.utils.html import format_html

        url = getattr(settings, "TIMEBELL_DASHBOARD_URL", None)
        if not url:
            return ""
        html: str = format_html('<a href="{}jobs?q={}">{}</a>', _with_trailing_slash(url), quote(query(row)), text)
        return html

    link.short_description = "Timebell"  # type: ignore[attr-defined]  # the column's title in Django's admin
    return link


def _with_trailing_slash(url: str) -> str:
    return url if url.endswith("/") else f"{url}/"
