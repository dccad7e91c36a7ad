"""Commands of triggers, sources and connections."""

from __future__ import annotations

from timebell.features.triggers.cli.connection import connection
from timebell.features.triggers.cli.trigger import source, trigger

COMMANDS = {"connection": connection, "source": source, "trigger": trigger}
