"""Run the Timebell command line from another one: `manage.py timebell ...` and `flask timebell ...`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from timebell.errors import TimebellError


def run(program: str, arguments: Sequence[str], app: str | None, url: Callable[[], str]) -> None:
    """Run a Timebell command for `app` (`module:attribute`) and its database, or for the database at `url`.

    `program` is the command's name in usage messages.
    """
    from timebell.cli.loading import load_app
    from timebell.cli.main import main
    from timebell.cli.output import exit_code, print_error

    try:
        if app is not None:
            os.environ.setdefault("TIMEBELL_APP", app)
            os.environ["TIMEBELL_DATABASE_URL"] = load_app(app).settings.database_url
        else:
            os.environ.setdefault("TIMEBELL_DATABASE_URL", url())
    except TimebellError as error:
        print_error(error)
        sys.exit(exit_code(error))
    sys.argv = [program, *arguments]
    main()
