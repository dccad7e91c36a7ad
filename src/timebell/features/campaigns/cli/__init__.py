"""Commands of campaigns, devices and segments."""

from __future__ import annotations

from timebell.features.campaigns.cli.campaign import campaign
from timebell.features.campaigns.cli.device import device
from timebell.features.campaigns.cli.segment import segment

COMMANDS = {"campaign": campaign, "device": device, "segment": segment}
