"""Commands of triggers, sources and connections."""

from __future__ import annotations

from timebell.cli.connection import connection
from timebell.cli.trigger import source, trigger

COMMANDS = {"connection": connection, "source": source, "trigger": trigger}
