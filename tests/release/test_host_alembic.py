"""Alembic of the host application: `alembic revision --autogenerate` leaves Timebell's tables alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from tests.servers import Postgres
from tests.unit.cli.process import ROOT
from timebell import Timebell

ENV = """
from alembic import context
from sqlalchemy import Column, Integer, MetaData, Table, create_engine
{imports}
metadata = MetaData()
Table("orders", metadata, Column("id", Integer, primary_key=True))
with create_engine(context.config.get_main_option("sqlalchemy.url")).connect() as connection:
    context.configure(connection=connection, target_metadata=metadata, {arguments})
    with context.begin_transaction():
        context.run_migrations()
"""
FILTER = "from timebell.integrations.alembic import include_name"
WITH_FILTER = {"imports": FILTER, "arguments": "include_name=include_name"}


@pytest.fixture(scope="session", params=["installed", pytest.param("2.0", marks=pytest.mark.soak)])
def sqlalchemy_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with another version of SQLAlchemy; empty for the installed one."""
    folder = tmp_path_factory.mktemp("sqlalchemy")
    if request.param != "installed":
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
        subprocess.run([*install, "sqlalchemy>=2.0.58,<2.1"], check=True)
    return str(folder)


def run_python(folder: Path, sqlalchemy_path: str, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((sqlalchemy_path, str(ROOT / "src"), str(ROOT)))}
    finished = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-6000:]
    return finished.stdout


def autogenerate(folder: Path, sqlalchemy_path: str, url: str, *, imports: str = "", arguments: str = "") -> str:
    """Return the migration that Alembic proposes for a project with the table `orders`."""
    project = folder / "migrations"
    (project / "versions").mkdir(parents=True)
    (folder / "alembic.ini").write_text(f"[alembic]\nscript_location = migrations\nsqlalchemy.url = {url}\n")
    (project / "env.py").write_text(ENV.format(imports=imports, arguments=arguments))
    (project / "script.py.mako").write_text(
        "revision = ${repr(up_revision)}\ndown_revision = ${repr(down_revision)}\nfrom alembic import op\n"
        "import sqlalchemy as sa\n\n\ndef upgrade():\n    ${upgrades}\n"
    )
    run_python(folder, sqlalchemy_path, "-m", "alembic", "revision", "--autogenerate", "-m", "x")
    (revision,) = (project / "versions").glob("*.py")
    return revision.read_text()


def add_tables(url: str) -> None:
    app = Timebell(url, timezone="UTC")
    app.sync.upgrade()
    app.sync.close()


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_the_filter_hides_the_tables(
    store: str, sqlalchemy_path: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = make_url(request.getfixturevalue(f"{store}_url"))
    if store == "postgres":
        url = url.set(drivername="postgresql+psycopg")
    address = url.render_as_string(hide_password=False)
    proposed = autogenerate(tmp_path / "with", sqlalchemy_path, address, **WITH_FILTER)
    assert "op.create_table('orders'" in proposed
    assert "timebell" not in proposed
    assert "op.drop_table('timebell_jobs')" in autogenerate(tmp_path / "without", sqlalchemy_path, address)


def test_tables_in_a_schema_of_their_own_need_no_filter(
    sqlalchemy_path: str, tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.create_database()
    address = make_url(url).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    monkeypatch.setenv("TIMEBELL_DATABASE_SCHEMA", "bell")
    add_tables(url)
    assert "timebell" not in autogenerate(tmp_path / "default", sqlalchemy_path, address)
    every = {**WITH_FILTER, "arguments": "include_schemas=True, include_name=include_name"}
    assert "timebell" not in autogenerate(tmp_path / "every", sqlalchemy_path, address, **every)
    engine = create_engine(address)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM bell.timebell_jobs")).scalar_one() == 0
    engine.dispose()
    postgres.drop_database(url)


@pytest.mark.soak  # runs three files of tests
def test_the_library_works_on_this_sqlalchemy(sqlalchemy_path: str, tmp_path: Path) -> None:
    tests = ("tests/conformance/test_caller_connections.py", "tests/engine/test_own_schema.py",
             "tests/engine/test_app_public_api.py")  # fmt: skip
    run_python(ROOT, sqlalchemy_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path}", *tests)
