"""What importing and creating a `Timebell` loads, and its CPU time relative to SQLAlchemy alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import sys, time
start = time.process_time()
{code}
print(int((time.process_time() - start) * 1e6), *sys.modules)
"""
CREATE = "from timebell import Timebell; Timebell('sqlite:///unused.db', timezone='UTC')"
ROUNDS = 5


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which bytecode is cached, as it is after an installation."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return variables | {"PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")}


def run(code: str, environment: dict[str, str]) -> tuple[int, set[str]]:
    """Return the CPU time of code in microseconds, and the modules that are loaded then."""
    command = [sys.executable, "-c", MEASURE.format(code=code)]
    micros, *modules = subprocess.check_output(command, env=environment, text=True).split()
    return int(micros), set(modules)


def test_creating_an_app_loads_only_what_every_program_needs(environment: dict[str, str]) -> None:
    _, modules = run(CREATE, environment)
    assert "timebell.store.dialects.sqlite.store" in modules
    unwanted = {
        "alembic", "asyncpg", "fastapi", "html", "multiprocessing", "psycopg", "pydantic", "pymysql",
        "sqlalchemy.dialects.mysql", "sqlalchemy.dialects.postgresql", "sqlalchemy.dialects.sqlite",
        "sqlalchemy.ext.asyncio", "sqlalchemy.orm",
    }  # fmt: skip
    assert modules & unwanted == set()
    own = {name for name in modules if name.split(".")[0] == "timebell"}
    rarely_used = (
        "timebell.engine", "timebell.observe", "timebell.store.audit", "timebell.store.cluster", "timebell.store.jobs",
        "timebell.store.schedules", "timebell.store.schema", "timebell.store.tenancy", "timebell.sync",
        "timebell.recurrence.codec", "timebell.recurrence.cron", "timebell.recurrence.rrule", "timebell.tenancy",
    )  # fmt: skip
    assert [name for name in own if name.startswith(rarely_used)] == []
    assert [name for name in own if name.startswith("timebell.features.") and name.count(".") > 3] == []
    assert len(own) <= 76, "each module takes about 0.3 ms, with its classes 1 ms: import it where it is used"


def test_creating_an_app_leaves_garbage_collection_as_it_was(environment: dict[str, str]) -> None:
    for state in ("enable", "disable"):
        code = f"import gc; gc.{state}(); before = gc.isenabled(), gc.get_threshold(); {CREATE}"
        run(f"{code}; assert (gc.isenabled(), gc.get_threshold()) == before", environment)


def test_the_first_use_of_sync_loads_no_orm(environment: dict[str, str]) -> None:
    """A handler's thread may be the first to use it, and SQLAlchemy fails in other threads while its ORM is loaded."""
    _, modules = run(f"{CREATE}.sync", environment)
    assert modules & {"asyncpg", "sqlalchemy.ext.asyncio", "sqlalchemy.orm"} == set()


def test_an_engine_loads_the_orm_before_it_runs_statements(environment: dict[str, str]) -> None:
    _, modules = run("import timebell.engine.service", environment)
    assert {"sqlalchemy.ext.asyncio", "sqlalchemy.orm"} <= modules


def test_importing_the_package_loads_no_dependency(environment: dict[str, str]) -> None:
    _, modules = run("import timebell", environment)
    assert modules & {"sqlalchemy", "orjson", "asyncio", "timebell.app"} == set()


def test_importing_and_creating_an_app_takes_little_more_than_importing_sqlalchemy(environment: dict[str, str]) -> None:
    """On an idle machine of 2026 SQLAlchemy takes about 100 ms, and all of this less than 300 ms."""
    micros = {
        code: min(run(code, environment)[0] for _ in range(ROUNDS))
        for code in ("import timebell", CREATE, "import sqlalchemy")
    }
    assert micros["import timebell"] < 50_000
    assert micros[CREATE] < 2.0 * micros["import sqlalchemy"], micros
