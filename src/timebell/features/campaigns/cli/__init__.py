"""Commands of campaigns and devices."""

from __future__ import annotations

from timebell.features.campaigns.cli.campaign import campaign
from timebell.features.campaigns.cli.device import device

COMMANDS = {"campaign": campaign, "device": device}
