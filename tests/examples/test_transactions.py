"""Jobs in transactions of SQLAlchemy, psycopg and asyncpg: there if and only if the row is."""

from __future__ import annotations

from .processes import EXAMPLES, done


def test_jobs_are_there_if_and_only_if_rows_are(postgres_url: str) -> None:
    said = done("app.py", folder=EXAMPLES / "transactions", TIMEBELL_DATABASE_URL=postgres_url)
    kept = "kept-asyncpg kept-psycopg kept-sqlalchemy"
    assert said.splitlines() == [f"orders: {kept}", f"jobs: {kept}"]
