"""Jobs created on the connection of Django: they exist if and only if `transaction.atomic` commits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import django as framework
import pytest
from django.conf import settings

if not settings.configured:
    settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}, USE_TZ=True)
    framework.setup()

from django.db import connection as default_connection
from django.db import connections, transaction
from django.db.transaction import TransactionManagementError
from django.utils.connection import ConnectionProxy

from timebell import Arrived, Every, Retry, Timebell
from timebell.errors import InvalidInput, NotFound, TimebellError
from timebell.integrations.django import completing, dashboard_link, database_url, fresh_connections

ALIAS = "joined"


def described(url: str) -> dict[str, Any]:
    """Return the entry of DATABASES for a URL."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": parts.path[1:]}
    return {
        "ENGINE": "django.db.backends.postgresql", "NAME": parts.path[1:], "USER": parts.username,
        "PASSWORD": parts.password or "", "HOST": parts.hostname, "PORT": str(parts.port),
    }  # fmt: skip


@pytest.fixture
def django(store_url: str) -> Iterator[ConnectionProxy]:
    """A connection of Django to the store's database, like `django.db.connection`."""
    if store_url.startswith("mariadb"):
        pytest.skip("Django speaks to MariaDB by mysqlclient, which has to be compiled")
    connections.databases[ALIAS] = connections.configure_settings({ALIAS: described(store_url), "default": {}})[ALIAS]
    proxy = ConnectionProxy(connections, ALIAS)
    with proxy.cursor() as cursor:
        cursor.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    yield proxy
    proxy.close()
    del connections[ALIAS], connections.databases[ALIAS]


@pytest.fixture
def app(store_url: str) -> Iterator[Timebell]:
    app = Timebell(store_url, timezone="UTC")
    app.sync.open()
    yield app
    app.sync.close()


def add(django: ConnectionProxy, order: int) -> None:
    with django.cursor() as cursor:
        cursor.execute("INSERT INTO orders VALUES (%s)", [order])


def orders(django: ConnectionProxy) -> list[int]:
    with django.cursor() as cursor:
        cursor.execute("SELECT id FROM orders ORDER BY id")
        return [id_ for (id_,) in cursor.fetchall()]


def jobs(app: Timebell) -> list[Any]:
    return sorted(job.payload for job in app.sync.list(topic="t").items)


def test_the_job_exists_if_and_only_if_the_transaction_commits(django: ConnectionProxy, app: Timebell) -> None:
    with transaction.atomic(using=ALIAS):
        add(django, 1)
        kept = app.sync.schedule_at("t", payload=1, metadata={"a": [1]}, owner_id="ana", connection=django)
    with pytest.raises(RuntimeError), transaction.atomic(using=ALIAS):
        add(django, 2)
        gone = app.sync.schedule_at("t", payload=2, connection=connections[ALIAS])
        raise RuntimeError
    assert (orders(django), jobs(app)) == ([1], [1])
    assert app.sync.get(kept.id) == kept
    with pytest.raises(NotFound):
        app.sync.get(gone.id)


def test_rolling_back_a_savepoint_removes_its_jobs(django: ConnectionProxy, app: Timebell) -> None:
    with transaction.atomic(using=ALIAS):
        add(django, 1)
        app.sync.schedule_at("t", payload=1, connection=django)
        with pytest.raises(RuntimeError), transaction.atomic(using=ALIAS):
            add(django, 2)
            app.sync.schedule_at("t", payload=2, connection=django)
            raise RuntimeError
        app.sync.schedule_at("t", payload=3, connection=django)
    assert (orders(django), jobs(app)) == ([1], [1, 3])


def test_cancels_reschedules_and_schedules_join_the_transaction(django: ConnectionProxy, app: Timebell) -> None:
    first, second = (app.sync.schedule_at("t", "2198-01-01T00:00", payload=each) for each in (1, 2))
    with transaction.atomic(using=ALIAS):
        assert app.sync.cancel(first.id, connection=django).outcome == "prevented"
        moved = app.sync.reschedule(second.id, "2199-01-01T00:00", connection=django)
        made = app.sync.schedule_repeat("t", Every("PT1H"), name="hourly", connection=django)
        transaction.set_rollback(True, using=ALIAS)
    assert [app.sync.get(each.id).state for each in (first, second)] == ["pending", "pending"]
    for id_, get in ((moved.id, app.sync.get), (made.id, app.sync.schedules.get)):
        with pytest.raises(NotFound):
            get(id_)
    with transaction.atomic(using=ALIAS):
        app.sync.cancel(first.id, connection=django)
        kept = app.sync.schedule_repeat("t", Every("PT1H"), name="hourly", connection=django)
    assert app.sync.get(first.id).state == "cancelled"
    assert app.sync.schedules.get(kept.id).name == "hourly"


async def ended(app: Timebell, id_: str) -> Any:
    """Wait for a job to finish and return it."""
    async with asyncio.timeout(30):
        while (found := await app.get(id_)).state in ("pending", "running"):
            await asyncio.sleep(0.02)
    return found


def test_rows_of_a_handler_and_its_completion_are_one_commit(django: ConnectionProxy, store_url: str) -> None:
    app = Timebell(store_url, timezone="UTC")

    @app.on("t", retry=Retry(attempts=2, delay=0.05))
    @fresh_connections
    def bill(event: Arrived) -> str:
        with completing(event, ALIAS):
            add(django, event.attempt)
            event.result = "billed"
            if event.attempt == 1:
                raise ValueError("after the row")
        return "not kept"

    async def body() -> Any:
        try:
            async with app.running(poll=0.05):
                return await ended(app, (await app.schedule_at("t")).id)
        finally:
            await app.close()

    job = asyncio.run(body())
    assert (job.state, job.attempt, job.result) == ("completed", 2, "billed")
    assert orders(django) == [2]


def test_a_handler_whose_attempt_has_ended_writes_no_row(django: ConnectionProxy, store_url: str) -> None:
    app, over, seen = Timebell(store_url, timezone="UTC"), threading.Event(), list[str]()

    @app.on("t", timeout=0.2, retry=Retry(attempts=1))
    @fresh_connections
    def late(event: Arrived) -> None:
        assert over.wait(30)
        try:
            with completing(event, ALIAS):
                add(django, 1)
        except TimebellError as refused:
            seen.append(refused.code)

    async def body() -> Any:
        try:
            async with app.running(poll=0.05):
                job = await ended(app, (await app.schedule_at("t")).id)
                over.set()
                async with asyncio.timeout(30):
                    while not seen:
                        await asyncio.sleep(0.02)
                return job
        finally:
            over.set()
            await app.close()

    assert asyncio.run(body()).state == "failed"
    assert seen == ["ATTEMPT_ENDED"]
    assert orders(django) == []


def test_a_call_outside_of_a_transaction_is_refused(django: ConnectionProxy, app: Timebell) -> None:
    with pytest.raises(InvalidInput) as refused:
        app.sync.schedule_at("t", connection=django)
    assert refused.value.code == "TRANSACTION_MISSING"
    assert jobs(app) == []


def test_a_transaction_that_django_marked_broken_refuses_jobs(django: ConnectionProxy, app: Timebell) -> None:
    with pytest.raises(TransactionManagementError), transaction.atomic(using=ALIAS):
        transaction.set_rollback(True, using=ALIAS)
        app.sync.schedule_at("t", connection=django)
    assert jobs(app) == []


def test_on_an_event_loop_django_refuses_the_call(django: ConnectionProxy, app: Timebell) -> None:
    from django.core.exceptions import SynchronousOnlyOperation

    django.close()

    async def body() -> None:
        try:
            await app.schedule_at("t", connection=django)
        finally:
            await app.close()

    with pytest.raises(SynchronousOnlyOperation):
        asyncio.run(body())


def test_a_connection_to_another_kind_of_database_is_refused(postgres_url: str) -> None:
    app = Timebell(postgres_url, timezone="UTC")
    try:
        with pytest.raises(InvalidInput) as refused, transaction.atomic():
            app.sync.schedule_at("t", connection=default_connection)
        assert refused.value.code == "INVALID_CONNECTION"
    finally:
        app.sync.close()
        default_connection.close()


@pytest.mark.parametrize(
    ("described", "url"),
    [
        ({"ENGINE": "django.db.backends.sqlite3", "NAME": "/srv/shop.db"}, "sqlite:////srv/shop.db"),
        ({"ENGINE": "django.db.backends.postgresql", "NAME": "shop"}, "postgresql:///shop"),
        ({"ENGINE": "django.contrib.gis.db.backends.postgis", "NAME": "shop", "USER": "ana", "PASSWORD": "a@b",
          "HOST": "db.example", "PORT": "5433"}, "postgresql://ana:a%40b@db.example:5433/shop"),
        ({"ENGINE": "django.db.backends.postgresql", "NAME": "shop", "USER": "ana", "HOST": "/run/postgresql"},
         "postgresql://ana@/shop?host=%2Frun%2Fpostgresql"),
    ],
)  # fmt: skip
def test_django_database_settings_become_urls(
    described: dict[str, Any], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(settings.DATABASES, "other", described)
    assert database_url("other") == url
    Timebell(url)  # accepts the URL


@pytest.mark.parametrize(
    "described",
    [
        {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
        {"ENGINE": "django.db.backends.oracle", "NAME": "x"},
    ],
)
def test_unsupported_django_databases_are_refused(described: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(settings.DATABASES, "other", described)
    with pytest.raises(InvalidInput) as refused:
        database_url("other")
    assert refused.value.code == "INVALID_DATABASE_URL"


def test_a_handlers_connection_is_closed_after_the_handler(django: ConnectionProxy) -> None:
    django.close()
    seen: list[Any] = []

    @fresh_connections
    def handler(order: int) -> int:
        seen.append(orders(django))
        assert django.connection is not None
        return order

    assert handler(7) == 7
    assert (seen, django.connection) == ([[]], None)


def test_rows_link_to_their_jobs_in_the_dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    link = dashboard_link(lambda row: f"owner:{row}")
    assert link("a&b") == ""
    monkeypatch.setattr(settings, "TIMEBELL_DASHBOARD_URL", "https://bell.example/ui", raising=False)
    assert link("a&b") == '<a href="https://bell.example/ui/jobs?q=owner%3Aa%26b">jobs</a>'
