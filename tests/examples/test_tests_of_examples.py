"""The tests of the examples pass: those that the owner of such an application writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sqlalchemy import make_url

from .processes import EXAMPLES, run_program
from .test_django import database

PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_fastapi(driver: str, postgres_url: str) -> None:
    url = make_url(postgres_url).set(drivername=f"postgresql+{driver}").render_as_string(hide_password=False)
    assert "2 passed" in run_program(*PYTEST, folder=EXAMPLES / "fastapi_orders", SHOP_DATABASE_URL=url)


def test_flask() -> None:
    assert "1 passed" in run_program(*PYTEST, folder=EXAMPLES / "flask_app")


@pytest.mark.slow
def test_shop(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "shop", tmp_path / "shop")  # its tests create a database file
    assert "6 passed" in run_program(*PYTEST, folder=tmp_path / "shop")


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_django(store: str, request: pytest.FixtureRequest) -> None:
    where = database(request.getfixturevalue(f"{store}_url"))
    run_program("manage.py", "test", "--noinput", folder=EXAMPLES / "django_app", **where)
