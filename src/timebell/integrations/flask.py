"""Flask extension: `FlaskTimebell(bell, web)`, or `FlaskTimebell(bell)` and `init_app(web)` later."""

from __future__ import annotations

from typing import Any

import click
from flask import Flask

from timebell.app import Timebell
from timebell.integrations import commands
from timebell.targets.arrived import Arrived
from timebell.targets.handler import CallNext


class FlaskTimebell:
    """Run handlers of `bell` in the application context, and add the command `flask timebell ...`.

    `current_app`, `db.session` and other objects bound to that context are available in every handler, async or sync,
    and are torn down after it. `flask timebell run` requires the setting `TIMEBELL_APP` in the application's
    configuration, the location of `bell` (`shop.bell:bell`).
    """

    def __init__(self, bell: Timebell, web: Flask | None = None) -> None:
        self.bell = bell
        self._web: Flask | None = None
        bell.middleware(self._run_in_context)
        if web is not None:
            self.init_app(web)

    def init_app(self, web: Flask) -> None:
        """Attach to an application and use its context for handlers; a later call replaces the application."""
        self._web = web
        web.extensions["timebell"] = self.bell
        web.cli.add_command(self._build_command(web))

    async def _run_in_context(self, event: Arrived, call_next: CallNext) -> Any:
        if self._web is None:
            return await call_next(event)
        with self._web.app_context():
            return await call_next(event)

    def _build_command(self, web: Flask) -> click.Command:
        @click.command("timebell", context_settings={"ignore_unknown_options": True, "help_option_names": []})
        @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
        def timebell(arguments: tuple[str, ...]) -> None:
            """Run any Timebell command: run, doctor, db upgrade, job list and so on."""
            url = self.bell.settings.database_url
            commands.run("flask timebell", arguments, web.config.get("TIMEBELL_APP"), lambda: url)

        return timebell
