"""`manage.py timebell run`, `manage.py timebell db upgrade` and all its other commands, on Django's database."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from timebell.integrations import commands
from timebell.integrations.django import database_url


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    """What comes after `timebell` is for Timebell's own command line."""

    help = "Timebell: run, doctor, db upgrade, job list and all its other commands."

    def add_arguments(self, parser: Any) -> None:
        """As in BaseCommand: for `call_command("timebell", "db", "upgrade")`, which ends in SystemExit."""
        parser.add_argument("arguments", nargs="*")

    def run_from_argv(self, argv: list[str]) -> None:
        """As in BaseCommand, which would want to know the options."""
        self.handle(arguments=argv[2:])

    def handle(self, *args: Any, **options: Any) -> None:
        """As in BaseCommand."""
        app = getattr(settings, "TIMEBELL_APP", None)
        commands.run("manage.py timebell", options["arguments"], app, database_url)
