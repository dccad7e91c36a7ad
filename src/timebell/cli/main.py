"""Entry point of `timebell`: declares the commands. The module of a command is imported when it is called."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

try:
    from timebell.cli import click_signatures
except ModuleNotFoundError:  # the library alone is installed
    sys.exit('The command line needs the extra "server": pip install "timebell[server]"')

from timebell.cli.apply import apply_, export
from timebell.cli.dead import dead
from timebell.cli.external_commands import add_external_commands
from timebell.cli.job import job
from timebell.cli.keys import key, tenant
from timebell.cli.observe import observe
from timebell.cli.operate import api, calendar, config, node
from timebell.cli.output import FAILED, INTERRUPTED, Format, exit_code, print_error, print_record
from timebell.cli.release import release
from timebell.cli.schedule import schedule
from timebell.cli.target import secret, target
from timebell.cli.users import user
from timebell.errors import TimebellError
from timebell.features import FEATURES

HELP = """Durable job scheduler: each job runs at its time, once, in the right time zone.

Data goes to stdout, messages to stderr. Exit codes: 0 success, 1 failed, 2 invalid input, 3 not found, 4 refused,
5 conflict, 6 unreachable, 7 differences found, 130 interrupted. Settings, by precedence: flag, TIMEBELL_* variable,
timebell.toml, default."""

root = click_signatures.Group(HELP)
db = click_signatures.Group("Database schema: upgrade and inspect.")
imports = click_signatures.Group("Import schedules from other schedulers.")
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
for feature in FEATURES:
    if feature.commands is not None:
        for name, group in import_module(feature.commands).COMMANDS.items():
            root.add_command(group, name)
for command in (apply_, export, calendar, api, release):
    root.command(command.__name__.rstrip("_"))(command)
add_external_commands(root)

AppReference = Annotated[
    str | None, click_signatures.Argument(metavar="APP", help="path/to/file.py or module:attr (default: app).")
]
Host = Annotated[str | None, click_signatures.Option(help="Address to listen on.  [default: 127.0.0.1]")]
Port = Annotated[int | None, click_signatures.Option(min=1, max=65535, help="Port to listen on.  [default: 8700]")]
Database = Annotated[
    str | None,
    click_signatures.Option(metavar="URL", help="sqlite:///file, postgresql:// or mariadb://user@host/name."),
]
Output = Annotated[Format | None, click_signatures.Option("--output", "-o", help="Output format.  [default: table]")]
Timezone = Annotated[
    str | None, click_signatures.Option("--timezone", "-z", "--tz", metavar="ZONE", help="IANA zone: Asia/Seoul.")
]


@root.command()
def dev(
    app: AppReference = None,
    host: Host = None,
    port: Port = None,
    reload: Annotated[bool, click_signatures.Option(help="Restart when a file of the app changes.")] = True,
) -> None:
    """Run everything in one process and print each fire.

    Needs no configuration: data is in ./timebell.db, the dashboard on port 8700.
    """
    from timebell.cli import serve

    serve.dev(app, host, port, reload=reload)


@root.command()
def run(
    app: AppReference = None,
    roles: Annotated[
        str | None,
        click_signatures.Option(
            metavar="LIST",
            help="Comma-separated roles: planner, worker, api, ui. planner or worker runs the whole engine; ui is the"
            " dashboard.  [default: all]",
        ),
    ] = None,
    host: Host = None,
    port: Port = None,
    until_idle: Annotated[bool, click_signatures.Option("--until-idle", help="Exit when no work is due.")] = False,
) -> None:
    """Run a production process.

    The schema must be current (timebell db upgrade). SIGTERM drains: running jobs may finish, then the process exits.
    """
    from timebell.cli import serve

    serve.run(app, roles, host, port, until_idle=until_idle)


@root.command("next")
def next_(
    expression: Annotated[
        str | None, click_signatures.Argument(metavar="EXPR", help='Cron, e.g. "0 9 * * 1-5".')
    ] = None,
    timezone: Timezone = None,
    count: Annotated[int, click_signatures.Option("--count", "-n", min=1, max=10_000, help="Number of fires.")] = 5,
    start: Annotated[
        str | None, click_signatures.Option("--from", metavar="T", help="Start of the listing.  [default: now]")
    ] = None,
    every: Annotated[
        str | None, click_signatures.Option(metavar="D", help="Use an interval: PT90M, P1D, R/<anchor>/P1D.")
    ] = None,
    rrule: Annotated[
        str | None,
        click_signatures.Option(metavar="RULE", help="Use an RRULE, or DTSTART, RRULE, EXDATE and RDATE lines."),
    ] = None,
    since: Annotated[
        str | None,
        click_signatures.Option(
            metavar="last_end|last_start", help="Use a fixed delay: count the interval from each run."
        ),
    ] = None,
    stdin: Annotated[
        bool, click_signatures.Option("--stdin", help="Read JSON lines {kind, spec, tz, start, count}.")
    ] = False,
    output: Output = None,
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
def db_upgrade(
    check: Annotated[
        bool, click_signatures.Option("--check", help="Only check; exit 7 if an upgrade is needed.")
    ] = False,
    database: Database = None,
) -> None:
    """Upgrade the schema to this release. Safe to repeat."""
    from timebell.cli import database as tables

    raise click_signatures.Exit(tables.upgrade_tables(database, check=check))


@db.command("status")
def db_status(database: Database = None, output: Output = None) -> None:
    """Show the schema version and the one this release needs."""
    from timebell.cli import database as tables

    raise click_signatures.Exit(tables.show_status(database, output))


@db.command("zones")
def db_zones(
    against: Annotated[
        Path | None,
        click_signatures.Option(metavar="FOLDER", help="Zone data of another release; compares the coming year."),
    ] = None,
    database: Database = None,
    output: Output = None,
) -> None:
    """Preview the effect of new zone data; exit 7 if anything moves.

    Without --against: the next occurrences and jobs that the installed zone data will move when the engine starts.
    """
    from timebell.cli import zones

    raise click_signatures.Exit(zones.preview_changes(database, against, output))


@db.command("roles")
def db_roles(
    prefix: Annotated[str, click_signatures.Option(metavar="NAME", help="Prefix of the role names.")] = "timebell",
) -> None:
    """Print SQL that creates least-privilege roles (PostgreSQL): node, client, reader."""
    from timebell.cli import privileges

    raise click_signatures.Exit(privileges.print_roles(prefix, FEATURES))


@root.command("backup")
def backup_(
    file: Annotated[Path, click_signatures.Argument(help="File to write; it must not exist.")],
    database: Database = None,
    output: Output = None,
) -> None:
    """Copy the database while nodes use it (SQLite).

    For PostgreSQL and MariaDB, prints the backup command to run instead.
    """
    from timebell.cli import backup

    raise click_signatures.Exit(backup.backup(file, database, output))


@root.command("restore")
def restore_(
    file: Annotated[
        Path | None, click_signatures.Argument(help="Backup file. Omit it after pg_restore or similar.")
    ] = None,
    yes: Annotated[bool, click_signatures.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    database: Database = None,
    output: Output = None,
) -> None:
    """Restore a backup, and hold the work that became due since it was taken.

    That work may have run already, so it waits for timebell release. The previous SQLite file is kept beside the
    restored one. PostgreSQL and MariaDB: restore with their own tools, then run this command without a file.
    """
    from timebell.cli import backup

    raise click_signatures.Exit(backup.restore(file, database, output, yes=yes))


@root.command()
def doctor(database: Database = None, output: Output = None) -> None:
    """Find problems in the database, the settings and this machine, and work that is stuck."""
    from timebell.cli.doctor import report as doctors

    raise click_signatures.Exit(doctors.examine(database, output))


@root.command()
def watch(
    every: Annotated[float, click_signatures.Option(min=0.5, max=10, metavar="SECONDS", help="Check interval.")] = 2.0,
    fail: Annotated[bool, click_signatures.Option("--fail", help="Exit with code 1 at the first alarm.")] = False,
    database: Database = None,
    output: Output = None,
) -> None:
    """Raise an alarm when due work does not run, even if every node is dead.

    A separate process that only reads the database. Alarms go to stderr (with -o json, as lines to stdout) and to
    TIMEBELL_ALERT_URLS.
    """
    from timebell.cli import watch as watching

    raise click_signatures.Exit(watching.watch(database, every, output, fail=fail))


@root.command("audit")
def audit_(
    start: Annotated[str, click_signatures.Option("--from", metavar="T", help="Start, e.g. 2027-03-14T07:00:00Z.")],
    end: Annotated[str, click_signatures.Option("--to", metavar="T", help="End (exclusive).")],
    schedule: Annotated[
        str | None, click_signatures.Option(metavar="NAME", help="Only this schedule; name or id.")
    ] = None,
    tenant: Annotated[
        str | None, click_signatures.Option(metavar="T", help="Only this tenant.  [default: all]")
    ] = None,
    database: Database = None,
    output: Output = None,
) -> None:
    """Verify that no occurrence was missed or run twice.

    Recalculates the expected occurrences and compares them with the recorded runs; exit 7 on any difference.
    """
    from timebell.cli import audit

    raise click_signatures.Exit(audit.audit(start, end, schedule, tenant, database, output))


@root.command("why")
def why_(
    schedule: Annotated[str, click_signatures.Argument(help="Schedule name or id.")],
    instant: Annotated[str, click_signatures.Argument(help="Time of the occurrence: 2027-03-14T07:00:00Z.")],
    tenant: Annotated[str, click_signatures.Option(metavar="T", help="Tenant of the schedule.")] = "default",
    database: Database = None,
    output: Output = None,
) -> None:
    """Explain the outcome of one occurrence."""
    from timebell.cli import audit

    raise click_signatures.Exit(audit.why(schedule, instant, tenant, database, output))


@imports.command("crontab")
def import_crontab(
    file: Annotated[
        Path | None, click_signatures.Argument(help="Crontab file, or - for stdin.  [default: crontab -l]")
    ] = None,
    timezone: Timezone = None,
    dry_run: Annotated[bool, click_signatures.Option("--dry-run", help="Show the schedules; write nothing.")] = False,
    system: Annotated[
        bool | None,
        click_signatures.Option("--system/--user", help="With or without a user column.  [default: detect]"),
    ] = None,
    database: Database = None,
    output: Output = None,
) -> None:
    """Create a schedule for each entry of a crontab. Safe to repeat."""
    from timebell.cli import crontab_import

    raise click_signatures.Exit(
        crontab_import.import_crontab(file, timezone, database, output, system=system, dry_run=dry_run)
    )


@root.command("simulate")
def simulate_(
    file: Annotated[Path, click_signatures.Argument(help="YAML: schedules as for apply, jobs, and a scenario.")],
    start: Annotated[str, click_signatures.Option("--from", metavar="T", help="Start of the simulated time.")],
    end: Annotated[str, click_signatures.Option("--to", metavar="T", help="End of the simulated time.")],
    outage: Annotated[
        list[str] | None, click_signatures.Option(metavar="T/T", help="All nodes are down; repeatable.")
    ] = None,
    late: Annotated[
        str | None, click_signatures.Option(metavar="D", help="List starts later than this.  [default: 60s]")
    ] = None,
    timezone: Timezone = None,
    output: Output = None,
) -> None:
    """Simulate schedules with the real engine on virtual time.

    Shows fires, skips with reasons, load peaks and simultaneous starts; exit 7 on unexplained lateness or lost runs.
    """
    from timebell.cli import simulate

    raise click_signatures.Exit(simulate.simulate(file, start, end, outage or [], late, output, timezone))


@root.command()
def completion(
    shell: Annotated[str, click_signatures.Argument(metavar="bash|zsh|fish", help="Your shell.")],
) -> None:
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
def version(output: Output = None) -> None:
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
    """Run the program; a TimebellError becomes a short message and an exit code."""
    try:
        click_signatures.run(root, "timebell")
    except TimebellError as error:
        print_error(error)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of stdout closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
