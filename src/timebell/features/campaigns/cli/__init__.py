"""Commands of campaigns."""

from __future__ import annotations

from timebell.cli.campaign import campaign

COMMANDS = {"campaign": campaign}
