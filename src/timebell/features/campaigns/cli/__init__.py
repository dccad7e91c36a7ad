"""Commands of campaigns."""

from __future__ import annotations

from timebell.features.campaigns.cli.campaign import campaign

COMMANDS = {"campaign": campaign}
