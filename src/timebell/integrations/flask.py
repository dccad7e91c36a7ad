"""Flask: `FlaskTimebell(bell, web)`, or `init_app` later, as Flask's extensions do."""

from __future__ import annotations

from typing import Any

import click
from flask import Flask

from timebell.app import Timebell
from timebell.integrations import commands
from timebell.targets.handler import Arrived, CallNext


class FlaskTimebell:
    """Handlers of `bell` run in the application's context, and `flask timebell ...` is the command line.

    `current_app`, `db.session` and whatever else hangs on that context are there in every handler, async or plain,
    and are torn down after it. The application may be given at once or to `init_app`. `TIMEBELL_APP` in its
    configuration says where `bell` is (`shop.bell:bell`): `flask timebell run` needs to know.
    """

    def __init__(self, bell: Timebell, web: Flask | None = None) -> None:
        self.bell = bell
        self._web: Flask | None = None
        bell.middleware(self._within)
        if web is not None:
            self.init_app(web)

    def init_app(self, web: Flask) -> None:
        """Join an application: the one whose context handlers get, the last if there are several."""
        self._web = web
        web.extensions["timebell"] = self.bell
        web.cli.add_command(self._command(web))

    async def _within(self, event: Arrived, call_next: CallNext) -> Any:
        if self._web is None:
            return await call_next(event)
        with self._web.app_context():
            return await call_next(event)

    def _command(self, web: Flask) -> click.Command:
        @click.command("timebell", context_settings={"ignore_unknown_options": True, "help_option_names": []})
        @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
        def timebell(arguments: tuple[str, ...]) -> None:
            """Timebell: run, doctor, db upgrade, job list and all its other commands."""
            url = self.bell.settings.database_url
            commands.run("flask timebell", arguments, web.config.get("TIMEBELL_APP"), lambda: url)

        return timebell
