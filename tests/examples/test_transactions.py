"""Jobs in transactions of SQLAlchemy, psycopg and asyncpg exist exactly when their rows do."""

from __future__ import annotations

from .processes import EXAMPLES, run_program


def test_jobs_exist_exactly_when_their_rows_do(postgres_url: str) -> None:
    output = run_program("app.py", folder=EXAMPLES / "transactions", TIMEBELL_DATABASE_URL=postgres_url)
    kept = "kept-asyncpg kept-psycopg kept-sqlalchemy"
    assert output.splitlines() == [f"orders: {kept}", f"jobs: {kept}"]
