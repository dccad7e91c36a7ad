"""Management command `timebell`: `manage.py timebell run`, `manage.py timebell db upgrade` and so on."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from timebell.integrations import commands
from timebell.integrations.django import database_url


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    """Pass all arguments to the Timebell command line, on Django's database."""

    help = "Run any Timebell command: run, doctor, db upgrade, job list and so on."

    def add_arguments(self, parser: Any) -> None:
        """Accept positional arguments, for `call_command("timebell", "db", "upgrade")`, which raises SystemExit."""
        parser.add_argument("arguments", nargs="*")

    def run_from_argv(self, argv: list[str]) -> None:
        """Skip option parsing, because Django does not know the options of Timebell's commands."""
        self.handle(arguments=argv[2:])

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the command."""
        app = getattr(settings, "TIMEBELL_APP", None)
        commands.run("manage.py timebell", options["arguments"], app, database_url)
