"""Entry point of `timebell`: declares the commands. The module of a command is imported when it is called."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

try:
    import click

    from timebell.cli.groups import Group
except ModuleNotFoundError:  # the library alone is installed
    sys.exit('The command line needs the extra "server": pip install "timebell[server]"')

from timebell.cli.apply import apply_, export
from timebell.cli.audit_log import audit_log
from timebell.cli.dead import dead
from timebell.cli.external_commands import add_external_commands
from timebell.cli.job import job
from timebell.cli.keys import key, tenant
from timebell.cli.observe import observe
from timebell.cli.operate import api, calendar, config, node, upcoming
from timebell.cli.options import database_option, output_option, timezone_option, yes_option
from timebell.cli.output import FAILED, INTERRUPTED, exit_code, print_error, print_record
from timebell.cli.release import release
from timebell.cli.schedule import schedule
from timebell.cli.target import secret, target
from timebell.cli.users import user
from timebell.errors import TimebellError
from timebell.features import FEATURES, enabled_features

HELP = """Durable job scheduler: each job runs at its time, at least once, in the right time zone.

Data goes to stdout, messages to stderr. Exit codes: 0 success, 1 failed, 2 invalid input, 3 not found, 4 refused,
5 conflict, 6 unreachable, 7 differences found, 130 interrupted. Settings, by precedence: flag, TIMEBELL_* variable,
timebell.toml, default."""

SECTIONS = {
    "Run": ("dev", "run", "watch", "release"),
    "Look": ("next", "upcoming", "calendar", "job", "dead", "why", "node"),
    "Change": ("schedule", "apply", "export", "import", "target", "secret"),
    "Operate": ("doctor", "db", "backup", "restore", "config", "key", "tenant", "user", "observe", "audit-log"),
    "Prove": ("audit", "simulate", "torture"),
}
"""Headings of `timebell --help`; the commands of features have one of their own, before the others."""

root = click.version_option(package_name="timebell", prog_name="timebell")(Group(HELP, SECTIONS))
db = Group("Database schema: upgrade and inspect.")
imports = Group("Import schedules from other schedulers.")
root.add_command(db, "db")
root.add_command(imports, "import")
root.add_command(schedule, "schedule")
root.add_command(job, "job")
root.add_command(dead, "dead")
root.add_command(node, "node")
root.add_command(config, "config")
root.add_command(key, "key")
root.add_command(tenant, "tenant")
root.add_command(user, "user")
root.add_command(target, "target")
root.add_command(secret, "secret")
root.add_command(observe, "observe")
root.add_command(audit_log, "audit-log")
for feature in FEATURES:
    if feature.commands is not None:
        commands = import_module(feature.commands).COMMANDS
        root.sections = {**root.sections, feature.heading: tuple(commands)}
        for name, group in commands.items():
            root.add_command(group, name)
for command in (apply_, export, upcoming, calendar, api, release):
    root.add_command(command)
add_external_commands(root)

app_reference_argument = click.argument(
    "app", required=False, metavar="[APP]", help="path/to/file.py or module:attr (default: app)."
)
host_option = click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
port_option = click.option("--port", type=click.IntRange(min=1, max=65535), help="Port to listen on.  [default: 8700]")


@root.command()
@app_reference_argument
@host_option
@port_option
@click.option("--reload/--no-reload", default=True, show_default=True, help="Restart when a file of the app changes.")
def dev(app: str | None, host: str | None, port: int | None, reload: bool) -> None:
    """Run everything in one process and print each fire.

    Needs no configuration: data is in ./timebell.db, the dashboard on port 8700.
    """
    from timebell.cli import serve

    serve.dev(app, host, port, reload=reload)


@root.command()
@app_reference_argument
@click.option(
    "--roles",
    metavar="LIST",
    help="Comma-separated roles: planner, worker, api, ui. planner or worker runs the whole engine; ui is the"
    " dashboard.  [default: all]",
)
@host_option
@port_option
@click.option("--until-idle", is_flag=True, help="Exit when no work is due.")
def run(app: str | None, roles: str | None, host: str | None, port: int | None, until_idle: bool) -> None:
    """Run a production process.

    The schema must be current (timebell db upgrade). SIGTERM drains: running jobs may finish, then the process exits.
    """
    from timebell.cli import serve

    serve.run(app, roles, host, port, until_idle=until_idle)


@root.command("next")
@click.argument("expression", required=False, metavar="[EXPR]", help='Cron, e.g. "0 9 * * 1-5".')
@timezone_option
@click.option(
    "--count", "-n", type=click.IntRange(min=1, max=10_000), default=5, show_default=True, help="Number of fires."
)
@click.option("--from", "start", metavar="T", help="Start of the listing.  [default: now]")
@click.option("--every", metavar="D", help="Use an interval: PT90M, P1D, R/<anchor>/P1D.")
@click.option("--rrule", metavar="RULE", help="Use an RRULE, or DTSTART, RRULE, EXDATE and RDATE lines.")
@click.option("--since", metavar="last_end|last_start", help="Use a fixed delay: count the interval from each run.")
@click.option("--stdin", is_flag=True, help="Read JSON lines {kind, spec, tz, start, count}.")
@output_option
def next_(
    expression: str | None,
    timezone: str | None,
    count: int,
    start: str | None,
    every: str | None,
    rrule: str | None,
    since: str | None,
    stdin: bool,
    output: str | None,
) -> None:
    """Describe an expression and list its next fires.

    Also shows the effect of clock changes in the coming year. Needs no database and no server.
    """
    from timebell.cli import upcoming

    if stdin:
        upcoming.answer_lines(sys.stdin)
    else:
        upcoming.print_upcoming(expression, every, rrule, since, timezone, count, start, output)


@db.command("upgrade")
@click.option("--check", is_flag=True, help="Only check; exit 7 if an upgrade is needed.")
@database_option
def db_upgrade(check: bool, database: str | None) -> None:
    """Upgrade the schema to this release. Safe to repeat."""
    from timebell.cli import database as tables

    raise click.exceptions.Exit(tables.upgrade_tables(database, check=check))


@db.command("status")
@database_option
@output_option
def db_status(database: str | None, output: str | None) -> None:
    """Show the schema version and the one this release needs."""
    from timebell.cli import database as tables

    raise click.exceptions.Exit(tables.show_status(database, output))


@db.command("zones")
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Zone data of another release; compares the coming year.",
)
@database_option
@output_option
def db_zones(against: Path | None, database: str | None, output: str | None) -> None:
    """Preview the effect of new zone data; exit 7 if anything moves.

    Without --against: the next occurrences and jobs that the installed zone data will move when the engine starts.
    """
    from timebell.cli import zones

    raise click.exceptions.Exit(zones.preview_changes(database, against, output))


@db.command("roles")
@click.option("--prefix", default="timebell", show_default=True, metavar="NAME", help="Prefix of the role names.")
def db_roles(prefix: str) -> None:
    """Print SQL that creates least-privilege roles (PostgreSQL): node, client, reader."""
    from timebell import settings
    from timebell.cli import privileges

    raise click.exceptions.Exit(privileges.print_roles(prefix, enabled_features(settings.load())))


@root.command("backup")
@click.argument("file", type=click.Path(path_type=Path), help="File to write; it must not exist.")
@database_option
@output_option
def backup_(file: Path, database: str | None, output: str | None) -> None:
    """Copy the database while nodes use it (SQLite).

    For PostgreSQL and MariaDB, prints the backup command to run instead.
    """
    from timebell.cli import backup

    raise click.exceptions.Exit(backup.backup(file, database, output))


@root.command("restore")
@click.argument(
    "file", required=False, type=click.Path(path_type=Path), help="Backup file. Omit it after pg_restore or similar."
)
@yes_option
@database_option
@output_option
def restore_(file: Path | None, yes: bool, database: str | None, output: str | None) -> None:
    """Restore a backup, and hold the work that became due since it was taken.

    That work may have run already, so it waits for timebell release. The previous SQLite file is kept beside the
    restored one. PostgreSQL and MariaDB: restore with their own tools, then run this command without a file.
    """
    from timebell.cli import backup

    raise click.exceptions.Exit(backup.restore(file, database, output, yes=yes))


@root.command()
@database_option
@output_option
def doctor(database: str | None, output: str | None) -> None:
    """Find problems in the database, the settings and this machine, and work that is stuck."""
    from timebell.cli.doctor import report as doctors

    raise click.exceptions.Exit(doctors.examine(database, output, enabled_features))


@root.command()
@click.option(
    "--every",
    type=click.FloatRange(min=0.5, max=10),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Check interval.",
)
@click.option("--fail", is_flag=True, help="Exit with code 1 at the first alarm.")
@database_option
@output_option
def watch(every: float, fail: bool, database: str | None, output: str | None) -> None:
    """Raise an alarm when due work does not run, even if every node is dead.

    A separate process that only reads the database. Alarms go to stderr (with -o json, as lines to stdout) and to
    TIMEBELL_ALERT_URLS.
    """
    from timebell.cli import watch as watching

    raise click.exceptions.Exit(watching.watch(database, every, output, fail=fail))


@root.command("audit")
@click.option("--from", "start", metavar="T", help="Start: 2027-03-14T07:00:00Z, or 12h.  [default: 24 hours ago]")
@click.option("--to", "end", metavar="T", help="End (exclusive).  [default: now]")
@click.option("--schedule", metavar="NAME", help="Only this schedule; name or id.")
@click.option("--tenant", metavar="T", help="Only this tenant.  [default: that of the key; in the database all]")
@database_option
@output_option
def audit_(
    start: str | None,
    end: str | None,
    schedule: str | None,
    tenant: str | None,
    database: str | None,
    output: str | None,
) -> None:
    """Verify that no occurrence was missed or run twice.

    Recalculates the expected occurrences and compares them with the recorded runs; exit 7 on any difference. Asks the
    server if TIMEBELL_URL or TIMEBELL_API_KEY is set and --database is not; otherwise reads the database.
    """
    from timebell.cli import audit

    raise click.exceptions.Exit(audit.audit(start, end, schedule, tenant, database, output))


@root.command("why")
@click.argument("subject", metavar="SCHEDULE|JOB", help="Schedule name or id, or a job id.")
@click.argument("instant", required=False, help="Time of the occurrence; without offset, local in the schedule's zone.")
@click.option("--tenant", metavar="T", help="Tenant of the schedule.  [default: that of the key, or default]")
@database_option
@output_option
def why_(subject: str, instant: str | None, tenant: str | None, database: str | None, output: str | None) -> None:
    """Explain the outcome of one occurrence or job.

    Reads the server if TIMEBELL_URL or TIMEBELL_API_KEY is set and --database is not; otherwise the database.
    """
    from timebell.cli import why

    why.why(subject, instant, tenant, database, output)


@imports.command("crontab")
@click.argument(
    "file", required=False, type=click.Path(path_type=Path), help="Crontab file, or - for stdin.  [default: crontab -l]"
)
@timezone_option
@click.option("--dry-run", is_flag=True, help="Show the schedules; write nothing.")
@click.option("--system/--user", default=None, help="With or without a user column.  [default: detect]")
@database_option
@output_option
def import_crontab(
    file: Path | None,
    timezone: str | None,
    dry_run: bool,
    system: bool | None,
    database: str | None,
    output: str | None,
) -> None:
    """Create a schedule for each entry of a crontab. Safe to repeat."""
    from timebell.cli import crontab_import

    raise click.exceptions.Exit(
        crontab_import.import_crontab(file, timezone, database, output, system=system, dry_run=dry_run)
    )


@imports.command("apscheduler")
@click.argument("source", help="A scheduler as module:name or path.py:name, or the database URL of its job store.")
@click.option("--table", default="apscheduler_jobs", help="Table of the job store.  [default: apscheduler_jobs]")
@click.option("--dry-run", is_flag=True, help="Verify and show the schedules; write nothing.")
@database_option
@output_option
def import_apscheduler(source: str, table: str, dry_run: bool, database: str | None, output: str | None) -> None:
    """Import the jobs of APScheduler 3, with equal fire times. Safe to repeat.

    Refuses each job that cannot be expressed exactly. Stored jobs are pickles: import only your own.
    """
    from timebell.cli.importers import report

    raise click.exceptions.Exit(report.import_apscheduler(source, table, database, output, dry_run=dry_run))


@imports.command("celery")
@click.argument("app", help="A Celery app as module:name or path.py:name.")
@click.option("--dry-run", is_flag=True, help="Verify and show the schedules; write nothing.")
@database_option
@output_option
def import_celery(app: str, dry_run: bool, database: str | None, output: str | None) -> None:
    """Import the beat schedule of a Celery app, with equal fire times. Safe to repeat.

    Its tasks are sent to the same workers. Refuses each entry that cannot be expressed exactly.
    """
    from timebell.cli.importers import report

    raise click.exceptions.Exit(report.import_celery(app, database, output, dry_run=dry_run))


@root.command("simulate")
@click.argument("file", type=click.Path(path_type=Path), help="YAML: schedules as for apply, jobs, and a scenario.")
@click.option("--from", "start", required=True, metavar="T", help="Start of the simulated time.")
@click.option("--to", "end", required=True, metavar="T", help="End of the simulated time.")
@click.option("--outage", multiple=True, metavar="T/T", help="All nodes are down; repeatable.")
@click.option("--late", metavar="D", help="List starts later than this.  [default: 60s]")
@timezone_option
@output_option
def simulate_(
    file: Path,
    start: str,
    end: str,
    outage: tuple[str, ...],
    late: str | None,
    timezone: str | None,
    output: str | None,
) -> None:
    """Simulate schedules with the real engine on virtual time.

    Shows fires, skips with reasons, load peaks and simultaneous starts; exit 7 on unexplained lateness or lost runs.
    """
    from timebell.cli import simulate

    raise click.exceptions.Exit(simulate.simulate(file, start, end, list(outage), late, output, timezone))


@root.command()
@click.argument("shell", metavar="bash|zsh|fish", help="Your shell.")
def completion(shell: str) -> None:
    """Print the completion script of a shell: source <(timebell completion bash)."""
    from click.shell_completion import get_completion_class

    from timebell.cli.output import print_data
    from timebell.errors import InvalidInput

    if shell not in ("bash", "zsh", "fish"):
        raise InvalidInput(
            f"There is no completion for {shell!r:.40}.", code="UNKNOWN_SHELL", fix="Use bash, zsh or fish."
        )
    completer = get_completion_class(shell)
    assert completer is not None
    print_data(completer(root, {}, "timebell", "_TIMEBELL_COMPLETE").source())


@root.command()
@output_option
def version(output: str | None) -> None:
    """Show versions: Timebell, Python, zone data, SQLite."""
    import platform
    import sqlite3

    from timebell.recurrence import tzdata_version
    from timebell.settings import load, package_version

    facts = {
        "timebell": package_version(), "python": platform.python_version(), "tzdata": tzdata_version(),
        "sqlite": sqlite3.sqlite_version,
    }  # fmt: skip
    print_record(facts, load(output=output).output)


def main() -> None:
    """Run the program; an error becomes a short message and an exit code."""
    try:
        sys.exit(root.main(prog_name="timebell", standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except TimebellError as error:
        print_error(error)
        sys.exit(exit_code(error))
    except click.Abort as aborted:
        sys.exit(INTERRUPTED if isinstance(aborted.__cause__, KeyboardInterrupt) else FAILED)
    except BrokenPipeError:  # the reader of stdout closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
