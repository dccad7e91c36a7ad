"""Verify, write and print the entries of another scheduler; the two commands of `timebell import`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from timebell.app import Timebell
from timebell.cli.importers.entry import Entry, NotExpressible
from timebell.cli.importers.verification import verify
from timebell.cli.output import FAILED, OK, print_message, print_records, print_table
from timebell.errors import Refused, TimebellError
from timebell.formatting import format_count, format_relative, to_local
from timebell.recurrence import Spec
from timebell.settings import load

BOUND_OPTIONS = ("start", "end")
DEFAULT_SETTINGS: dict[str, Any] = {
    "overlap": "skip", "catch_up": "latest", "catch_up_window": None, "missed_after": None, "jitter": None,
    "start": None, "end": None, "expires_after": None, "enabled": True, "target": None,
}  # fmt: skip
JSON_TYPES = (bool, int, float, str, dict)
SOURCE_WIDTH = 50  # of a table; other formats have all of it

Translation = Callable[[datetime], Entry]


def import_apscheduler(source: str, table: str, database: str | None, output: str | None, *, dry_run: bool) -> int:
    """Import the jobs of APScheduler. Return the exit code. Raises TimebellError."""
    with _requiring("apscheduler"):
        from timebell.cli.importers import apscheduler_jobs as jobs

    states = jobs.read_jobs(source, table)
    translations = [(state["id"], lambda now, state=state: jobs.convert(state, now)) for state in states]
    return _run_import(Timebell(database), translations, output, dry_run=dry_run)


def import_celery(source: str, database: str | None, output: str | None, *, dry_run: bool) -> int:
    """Import the beat schedule of a Celery app. Return the exit code. Raises TimebellError."""
    with _requiring("celery"):
        from timebell.cli.importers import celery_entries as entries

    celery, found = entries.read_entries(source)
    translations = [
        (name, lambda now, name=name, fields=fields: entries.convert(celery, name, fields, now))
        for name, fields in found
    ]
    app = Timebell(database)
    if app.settings.broker_celery_url is None:
        app.settings = replace(app.settings, broker_celery_url=celery.conf.broker_url)
        print_message("note: set TIMEBELL_BROKER_CELERY_URL on the nodes, to the broker of the Celery app.")
    return _run_import(app, translations, output, dry_run=dry_run)


@contextmanager
def _requiring(package: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise Refused(
            f"The package {error.name} is not installed here.", code="EXTRA_MISSING",
            fix=f"Run the import where your application runs, or: pip install {package}",
        ) from error  # fmt: skip


def _run_import(
    app: Timebell, translations: Iterable[tuple[str, Translation]], output: str | None, *, dry_run: bool
) -> int:
    settings = load(output=output)
    rows, refused = asyncio.run(_import_entries(app, translations, dry_run=dry_run))
    if settings.output == "table":
        print_table([_cells(row) for row in rows], ("NAME", "WAS", "BECOMES", "NEXT", "CHECKED", "OUTCOME", "WITH"))
    else:
        print_records(rows, settings.output)
    for row in rows:
        for note in row["notes"]:
            print_message(f"note: {row['name']}: {note}.")
    for name, reason in refused:
        print_message(f"refused: {name}: {reason}.")
    return FAILED if refused else OK


async def _import_entries(
    app: Timebell, translations: Iterable[tuple[str, Translation]], *, dry_run: bool
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Return a row for each imported entry, and the name and the reason of each refused one."""
    rows, refused = [], []
    try:
        if not dry_run:
            await app.open()  # from here on, app.clock follows the database clock
        for name, translate in translations:
            # A recurrence that counts from now is translated and verified with the same instant.
            now = app.clock.now()
            try:
                rows.append(await _import_entry(app, translate(now), now, dry_run=dry_run))
            except NotExpressible as reason:
                refused.append((name, str(reason)))
            except TimebellError as error:
                refused.append((name, f"{str(error).rstrip('.')} ({error.code})"))
    finally:
        if not dry_run:
            await app.close()
    return rows, refused


async def _import_entry(app: Timebell, entry: Entry, now: datetime, *, dry_run: bool) -> dict[str, Any]:
    if not isinstance(entry.recurrence, Spec):
        return await _import_one_shot(app, entry, entry.recurrence, now, dry_run=dry_run)
    bounds = {name: entry.options[name] for name in BOUND_OPTIONS if name in entry.options}
    spec, count = verify(entry, now, bounds)
    options = {"name": entry.name, "timezone": entry.timezone, **entry.options}
    draft = app.schedules.draft(entry.topic, spec, options, now)
    outcome, stored = "would be created", draft
    if not dry_run:
        stored = await app.schedules.put(draft, replace=True)
        changed = "changed" if stored.updated_at >= draft.updated_at else "unchanged"
        outcome = "created" if stored.id == draft.id else changed
    checked = f"{format_count(count, 'run')} equal"
    return _row(entry, stored.recurrence.describe(), stored.next_fire_at, checked, outcome, now)


async def _import_one_shot(
    app: Timebell, entry: Entry, run_at: datetime | None, now: datetime, *, dry_run: bool
) -> dict[str, Any]:
    outcome = "would be created"
    if not dry_run:
        # Request ids are kept forever, so a repeated import does not repeat a job that has run.
        request_id = f"import/{entry.name}/{'now' if run_at is None else run_at.astimezone(UTC).isoformat()}"
        job = await app.schedule_at(
            entry.topic, run_at, timezone=entry.timezone, client_request_id=request_id, on_conflict="keep",
            **entry.options,
        )  # fmt: skip
        outcome = "created" if job.created_at >= now else "unchanged"
    return _row(entry, "Once", run_at or now, "1 run equal", outcome, now)


def _row(entry: Entry, words: str, at: datetime | None, checked: str, outcome: str, now: datetime) -> dict[str, Any]:
    settings = {name: value for name, value in entry.options.items() if value != DEFAULT_SETTINGS.get(name, value)}
    return {
        "name": entry.name, "source": entry.source, "topic": entry.topic, "words": words,
        "settings": {name: _format_setting(value) for name, value in settings.items()},
        "next": None if at is None else at.astimezone(UTC).isoformat().replace("+00:00", "Z"),
        "nextLocal": None if at is None else to_local(at, entry.timezone).isoformat(),
        "in": None if at is None else format_relative(at - now), "checked": checked, "outcome": outcome,
        "notes": entry.notes,
    }  # fmt: skip


def _format_setting(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value if isinstance(value, JSON_TYPES) else str(value)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    source = row["source"] if len(row["source"]) <= SOURCE_WIDTH else f"{row['source'][: SOURCE_WIDTH - 1]}…"
    at = (row["nextLocal"] or "never").replace("T", " ")
    settings = " ".join(f"{name}={_shorten(value)}" for name, value in row["settings"].items())
    return row["name"], source, f"{row['topic']}: {row['words']}", at, row["checked"], row["outcome"], settings


def _shorten(value: Any) -> str:
    """Return a setting for a table; of a target its kind and queue."""
    return f"{value['kind']}:{value.get('queue', 'celery')}" if isinstance(value, dict) else str(value)
