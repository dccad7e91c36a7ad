"""Options that several commands share."""

from __future__ import annotations

import click

from timebell.cli.output import Format

output_option = click.option(
    "--output", "-o", type=click.Choice([each.value for each in Format]), help="Output format.  [default: table]"
)
database_option = click.option(
    "--database", metavar="URL", help="sqlite:///file, postgresql:// or mariadb://user@host/name."
)
timezone_option = click.option("--timezone", "-z", "--tz", metavar="ZONE", help="IANA zone: Asia/Seoul.")
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
