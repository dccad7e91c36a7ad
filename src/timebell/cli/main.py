"""`timebell`: what commands there are. Each one's work is imported when it is called."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

try:
    from timebell.cli import click_signatures
except ModuleNotFoundError:  # the library alone is installed
    sys.exit('The command line needs more than the library: pip install "timebell[server]"')

from timebell.cli.apply import apply_, export
from timebell.cli.campaign import campaign
from timebell.cli.connection import connection
from timebell.cli.dead import dead
from timebell.cli.job import job
from timebell.cli.keys import key, tenant
from timebell.cli.observe import observe
from timebell.cli.operate import api, calendar, config, node
from timebell.cli.output import FAILED, INTERRUPTED, Format, complain, emit_one, exit_code
from timebell.cli.release import recover
from timebell.cli.schedule import schedule
from timebell.cli.target import secret, target
from timebell.cli.torture import torture
from timebell.cli.trigger import source, trigger
from timebell.cli.users import user
from timebell.errors import TimebellError

HELP = """Things that must happen at a time: once, on time, in the right time zone.

Data goes to stdout, talk to stderr. Exit codes: 0 fine, 1 failed, 2 usage, 3 not found, 4 refused, 5 conflict,
6 unreachable, 7 differences found, 130 interrupted. Settings: flag, TIMEBELL_* variable, timebell.toml, default."""

root = click_signatures.Group(HELP)
db = click_signatures.Group("The tables: bring them up to date, or look.")
imports = click_signatures.Group("Take over what other schedulers have.")
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
root.add_command(campaign, "campaign")
root.add_command(secret, "secret")
root.add_command(connection, "connection")
root.add_command(source, "source")
root.add_command(trigger, "trigger")
root.add_command(observe, "observe")
for command in (apply_, export, calendar, api, recover, torture):
    root.command(command.__name__.rstrip("_"))(command)

App = Annotated[
    str | None, click_signatures.Argument(metavar="APP", help="path/to/file.py or module:attr (default: app).")
]
Host = Annotated[str | None, click_signatures.Option(help="Address to listen on.  [default: 127.0.0.1]")]
Port = Annotated[int | None, click_signatures.Option(min=1, max=65535, help="Port to listen on.  [default: 8700]")]
Database = Annotated[
    str | None,
    click_signatures.Option(metavar="URL", help="sqlite:///file, postgresql:// or mariadb://user@host/name."),
]
Output = Annotated[Format | None, click_signatures.Option("--output", "-o", help="How to print.  [default: table]")]
Zone = Annotated[
    str | None, click_signatures.Option("--timezone", "-z", "--tz", metavar="ZONE", help="IANA zone: Asia/Seoul.")
]


@root.command()
def dev(
    app: App = None,
    host: Host = None,
    port: Port = None,
    reload: Annotated[bool, click_signatures.Option(help="Start anew when a file of the app changes.")] = True,
) -> None:
    """Run all in one process and show each fire.

    Needs no configuration: data is in ./timebell.db, the dashboard on port 8700.
    """
    from timebell.cli import serve

    serve.dev(app, host, port, reload=reload)


@root.command()
def run(
    app: App = None,
    roles: Annotated[
        str | None,
        click_signatures.Option(
            metavar="LIST",
            help="Some of planner,worker,api,ui (default all). planner and worker go together so far;"
            " api is /livez and /readyz, ui is the dashboard.",
        ),
    ] = None,
    host: Host = None,
    port: Port = None,
    until_idle: Annotated[
        bool, click_signatures.Option("--until-idle", help="End when nothing is due any more.")
    ] = False,
) -> None:
    """Run a production process.

    The tables must be current (timebell db upgrade). SIGTERM drains: what runs may finish, then it leaves.
    """
    from timebell.cli import serve

    serve.run(app, roles, host, port, until_idle=until_idle)


@root.command("next")
def next_(
    expression: Annotated[
        str | None, click_signatures.Argument(metavar="EXPR", help='Cron, e.g. "0 9 * * 1-5".')
    ] = None,
    timezone: Zone = None,
    count: Annotated[int, click_signatures.Option("--count", "-n", min=1, max=10_000, help="How many fires.")] = 5,
    start: Annotated[
        str | None, click_signatures.Option("--from", metavar="T", help="After this time.  [default: now]")
    ] = None,
    every: Annotated[
        str | None, click_signatures.Option(metavar="D", help="An interval instead: PT90M, P1D, R/<anchor>/P1D.")
    ] = None,
    rrule: Annotated[
        str | None,
        click_signatures.Option(metavar="RULE", help="An RRULE instead, or DTSTART, RRULE, EXDATE and RDATE lines."),
    ] = None,
    since: Annotated[
        str | None,
        click_signatures.Option(metavar="last_end|last_start", help="Count the interval from each run instead."),
    ] = None,
    stdin: Annotated[
        bool, click_signatures.Option("--stdin", help="Answer JSON lines {kind, spec, tz, start, count}.")
    ] = False,
    output: Output = None,
) -> None:
    """Show what an expression means and when it fires.

    With what daylight saving will do to it in the coming year. Needs no database and no server.
    """
    from timebell.cli import upcoming

    if stdin:
        upcoming.answer(sys.stdin)
    else:
        upcoming.explain(expression, every, rrule, since, timezone, count, start, output)


@db.command("upgrade")
def db_upgrade(
    check: Annotated[
        bool, click_signatures.Option("--check", help="Only look; exit 7 if an upgrade is needed.")
    ] = False,
    database: Database = None,
) -> None:
    """Bring the tables up to this version. Safe to repeat."""
    from timebell.cli import database as tables

    raise click_signatures.Exit(tables.upgrade_tables(database, check=check))


@db.command("status")
def db_status(database: Database = None, output: Output = None) -> None:
    """Show the version of the tables and the one this release needs."""
    from timebell.cli import database as tables

    raise click_signatures.Exit(tables.show_status(database, output))


@db.command("zones")
def db_zones(
    against: Annotated[
        Path | None,
        click_signatures.Option(
            metavar="FOLDER", help="Zone data of another release: what differs in the coming year."
        ),
    ] = None,
    database: Database = None,
    output: Output = None,
) -> None:
    """Show what new zone data moves, before it does; exit 7 if anything.

    Without --against: next occurrences and jobs that the installed zone data will move when the engine starts.
    """
    from timebell.cli import zones

    raise click_signatures.Exit(zones.preview(database, against, output))


@db.command("roles")
def db_roles(
    prefix: Annotated[str, click_signatures.Option(metavar="NAME", help="What their names begin with.")] = "timebell",
) -> None:
    """Print the SQL of roles with the least privileges (PostgreSQL): node, client, reader."""
    from timebell.cli import privileges

    raise click_signatures.Exit(privileges.print_roles(prefix))


@root.command("backup")
def backup_(
    file: Annotated[Path, click_signatures.Argument(help="Where to put it; it must not exist.")],
    database: Database = None,
    output: Output = None,
) -> None:
    """Copy the database while nodes use it (SQLite).

    Of PostgreSQL it says how.
    """
    from timebell.cli import backup

    raise click_signatures.Exit(backup.backup(file, database, output))


@root.command("restore")
def restore_(
    file: Annotated[
        Path | None, click_signatures.Argument(help="A backup; left out, the database has been restored.")
    ] = None,
    yes: Annotated[bool, click_signatures.Option("--yes", "-y", help="Do not ask.")] = False,
    database: Database = None,
    output: Output = None,
) -> None:
    """Put a backup in place, and hold what fell due since it was made.

    It may have run already, so it waits for timebell recover. What was there is kept beside it. PostgreSQL: pg_restore
    first, then this without a file.
    """
    from timebell.cli import backup

    raise click_signatures.Exit(backup.restore(file, database, output, yes=yes))


@root.command()
def doctor(database: Database = None, output: Output = None) -> None:
    """Find what is set up wrongly: database, settings, machine; and what stands still."""
    from timebell.cli.doctor import report as doctors

    raise click_signatures.Exit(doctors.examine(database, output))


@root.command()
def watch(
    every: Annotated[
        float, click_signatures.Option(min=0.5, max=10, metavar="SECONDS", help="How often to look.")
    ] = 2.0,
    fail: Annotated[bool, click_signatures.Option("--fail", help="End with exit code 1 at the first alarm.")] = False,
    database: Database = None,
    output: Output = None,
) -> None:
    """Alarm when what should happen does not, even if every node is dead.

    A process of its own that only reads the database. Alarms go to stderr, with -o json as lines to stdout, and to
    TIMEBELL_ALERT_URLS.
    """
    from timebell.cli import watch as watching

    raise click_signatures.Exit(watching.watch(database, every, output, fail=fail))


@root.command("audit")
def audit_(
    start: Annotated[
        str, click_signatures.Option("--from", metavar="T", help="Where it begins: 2027-03-14T07:00:00Z.")
    ],
    end: Annotated[str, click_signatures.Option("--to", metavar="T", help="Where it ends.")],
    schedule: Annotated[
        str | None, click_signatures.Option(metavar="NAME", help="Only this one, by name or id.")
    ] = None,
    tenant: Annotated[
        str | None, click_signatures.Option(metavar="T", help="Only of this tenant.  [default: all]")
    ] = None,
    database: Database = None,
    output: Output = None,
) -> None:
    """Prove that no occurrence was missed or doubled.

    Regenerates what should have happened and compares it with what is recorded; exit 7 on any difference.
    """
    from timebell.cli import audit

    raise click_signatures.Exit(audit.audit(start, end, schedule, tenant, database, output))


@root.command("why")
def why_(
    schedule: Annotated[str, click_signatures.Argument(help="Its name or id.")],
    instant: Annotated[str, click_signatures.Argument(help="The occurrence: 2027-03-14T07:00:00Z.")],
    tenant: Annotated[str, click_signatures.Option(metavar="T", help="Whose schedule it is.")] = "default",
    database: Database = None,
    output: Output = None,
) -> None:
    """Say what became of one occurrence, and why."""
    from timebell.cli import audit

    raise click_signatures.Exit(audit.why(schedule, instant, tenant, database, output))


@imports.command("crontab")
def import_crontab(
    file: Annotated[
        Path | None, click_signatures.Argument(help="A crontab, or - for stdin.  [default: crontab -l]")
    ] = None,
    timezone: Zone = None,
    dry_run: Annotated[
        bool, click_signatures.Option("--dry-run", help="Show what would be made; write nothing.")
    ] = False,
    system: Annotated[
        bool | None,
        click_signatures.Option("--system/--user", help="With or without a user column.  [default: found out]"),
    ] = None,
    database: Database = None,
    output: Output = None,
) -> None:
    """Make a schedule of each entry of a crontab. Safe to repeat."""
    from timebell.cli import crontab_import

    raise click_signatures.Exit(crontab_import.take(file, timezone, database, output, system=system, dry_run=dry_run))


@root.command("simulate")
def simulate_(
    file: Annotated[Path, click_signatures.Argument(help="YAML: schedules as for apply, jobs, and what goes wrong.")],
    start: Annotated[str, click_signatures.Option("--from", metavar="T", help="When it begins.")],
    end: Annotated[str, click_signatures.Option("--to", metavar="T", help="When it ends.")],
    outage: Annotated[list[str] | None, click_signatures.Option(metavar="T/T", help="All nodes are down then.")] = None,
    late: Annotated[
        str | None, click_signatures.Option(metavar="D", help="Later starts are listed.  [default: 60s]")
    ] = None,
    timezone: Zone = None,
    output: Output = None,
) -> None:
    """Rehearse schedules: the real engine on virtual time.

    Shows fires, skips with reasons, load peaks and herds; exit 7 if anything is late without a reason, or lost.
    """
    from timebell.cli import simulate

    raise click_signatures.Exit(simulate.simulate(file, start, end, outage or [], late, output, timezone))


@root.command()
def completion(
    shell: Annotated[str, click_signatures.Argument(metavar="bash|zsh|fish", help="Yours.")],
) -> None:
    """Print the script that completes commands and flags: source <(timebell completion bash)."""
    from click.shell_completion import get_completion_class

    from timebell.cli.output import show
    from timebell.errors import InvalidInput

    if shell not in ("bash", "zsh", "fish"):
        raise InvalidInput(f"There is no completion for {shell!r:.40}.", code="SHELL_UNKNOWN", fix="bash, zsh or fish.")
    made = get_completion_class(shell)
    assert made is not None
    show(made(root, {}, "timebell", "_TIMEBELL_COMPLETE").source())


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
    emit_one(facts, load(output=output).output)


def main() -> None:
    """The program: errors of users become two lines and an exit code."""
    try:
        click_signatures.run(root, "timebell")
    except TimebellError as error:
        complain(error)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of our output had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
