"""The product runs without any one of its features, on a database without their tables."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Table, create_engine, inspect

from tests.api.web import SECRET
from timebell import Arrived, Timebell
from timebell.api import v1
from timebell.errors import NotFound, SchemaOutdated
from timebell.feature import Feature
from timebell.features import FEATURES
from timebell.store.open import _run_on_connection

Serve = Callable[..., Any]
PARTS = {
    "CampaignsFeature": ("campaigns", "/ui/campaigns", "/api/v1/campaigns", "campaign"),
    "TriggersFeature": ("triggers", "/ui/triggers", "/api/v1/triggers", "trigger"),
}
"""Class of a feature -> attribute of the app, page, path of the API, command."""


def own_tables(feature: Feature) -> set[str]:
    """Return the names of the tables that a feature defines."""
    module = vars(import_module(str(feature.tables)))
    return {table.name for table in module.values() if isinstance(table, Table)}


def drop_tables(url: str, names: set[str]) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        assert names <= set(inspect(connection).get_table_names())
        for name in names:
            connection.exec_driver_sql(f"DROP TABLE {name}")
    engine.dispose()


def test_every_feature_is_tested() -> None:
    assert {type(feature).__name__ for feature in FEATURES} == PARTS.keys()


@pytest.mark.parametrize("left_out", FEATURES, ids=lambda feature: type(feature).__name__)
async def test_app_and_dashboard_run_without_a_feature(
    left_out: Feature, serve_sqlite: Serve, sqlite_url: str
) -> None:  # fmt: skip
    attribute, page, path, _ = PARTS[type(left_out).__name__]
    drop_tables(sqlite_url, own_tables(left_out))
    app = Timebell(sqlite_url, timezone="UTC", features=[feature for feature in FEATURES if feature is not left_out])
    delivered: list[Any] = []

    @app.on("plain")
    async def plain(event: Arrived) -> None:
        delivered.append(event.payload)

    assert not hasattr(app, attribute)
    assert not hasattr(app.sync, attribute)
    async with serve_sqlite(allow_local=True, app=app) as browser, app.running(heartbeat=0.05) as service:
        await app.schedule_at("plain", payload=1, owner_id="ana", condition={"payload": 0})
        await app.schedule_at("plain", payload=2)
        await service.wait_until_idle()
        assert delivered == [2]  # the condition of the other job does not hold
        assert service.leader.fence is not None
        assert not service.failing_services
        with pytest.raises(NotFound):
            await app.schedule_at("plain", unless={"source": "duty", "query": "SELECT 1"})
        for shown in ("/ui/", "/ui/jobs", "/ui/search?q=plain"):
            response = await browser.get(shown)
            assert response.status_code == 200
            assert f'href="{page}"' not in response.text
        assert (await browser.get(page)).status_code == 404
        assert (await browser.web.get(path)).status_code == 404
        document = (await browser.web.get("/api/v1/openapi.json")).json()
        assert path.removeprefix("/api/v1") not in {name.removeprefix("/api/v1") for name in document["paths"]}
        erased = await app.erase("ana")
        assert (erased.items, erased.finished) == (0, 1)
        await app.secrets.put("unused", SECRET)
        await app.secrets.delete("unused")
    assert v1.build_routes(FEATURES) is not v1.build_routes(app.features)


@pytest.mark.parametrize("left_out", FEATURES, ids=lambda feature: type(feature).__name__)
def test_command_line_runs_without_a_feature(left_out: Feature) -> None:
    name = type(left_out).__name__
    code = (
        "import sys, timebell.features as features\n"
        f"features.FEATURES = tuple(each for each in features.FEATURES if type(each).__name__ != {name!r})\n"
        "import timebell.cli.main as main\n"
        "sys.argv = ['timebell', '--help']\n"
        "main.main()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    commands = {line.split()[0] for line in ran.stdout.splitlines() if line.startswith("  ") and line.strip()}
    assert PARTS[name][3] not in commands
    assert {"schedule", "job", *(command for *_, command in PARTS.values())} - {PARTS[name][3]} <= commands


@pytest.mark.parametrize("store", ["sqlite", "postgres", "mariadb"])
def test_tables_of_a_feature_are_created_when_it_is_enabled(
    store: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if store == "sqlite":
        url = f"sqlite:///{tmp_path}/bell.db"
    else:
        url = request.getfixturevalue(store).create_database()
    tables = {feature.name: own_tables(feature) for feature in FEATURES}
    monkeypatch.setenv("TIMEBELL_FEATURES", "none")
    assert upgraded_tables(url) & set.union(*tables.values()) == set()
    monkeypatch.setenv("TIMEBELL_FEATURES", "triggers")
    if store != "sqlite":  # whose tables are created by the first use
        with pytest.raises(SchemaOutdated, match="lacks the table timebell_items"):
            Timebell(url, timezone="UTC").sync.list()
    assert upgraded_tables(url) & set.union(*tables.values()) == tables["triggers"]
    monkeypatch.delenv("TIMEBELL_FEATURES")
    assert set.union(*tables.values()) <= upgraded_tables(url)


def upgraded_tables(url: str) -> set[str]:
    """Upgrade the tables, use the app, and return the names of the tables."""
    app = Timebell(url, timezone="UTC")
    app.sync.upgrade()
    app.sync.schedule_at("work")
    table_names = asyncio.run(_run_on_connection(url, lambda connection: inspect(connection).get_table_names()))
    app.sync.close()
    return set(table_names)
