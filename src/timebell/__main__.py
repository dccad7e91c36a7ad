"""`timebell` and `python -m timebell`: the command line, or without the extra `server` only `db upgrade`."""

from __future__ import annotations

import asyncio
import sys
from importlib.util import find_spec


def main() -> None:
    """Run a command."""
    if find_spec("click") is not None:
        from timebell.cli.main import main as run_command

        run_command()
    elif sys.argv[1:] == ["db", "upgrade"]:
        upgrade_tables()
    else:
        sys.exit('The library alone has one command, db upgrade. For the others: pip install "timebell[server]"')


def upgrade_tables() -> None:
    """Create or upgrade the tables of the database in TIMEBELL_DATABASE_URL."""
    from timebell import Timebell
    from timebell.errors import TimebellError

    try:
        version = asyncio.run(Timebell().upgrade())
    except TimebellError as error:
        sys.exit(str(error))
    sys.stderr.write(f"The tables have version {version}.\n")


if __name__ == "__main__":
    main()
