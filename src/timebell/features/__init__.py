"""The features of the product. Only this module and the composition roots know them; see `timebell.feature`."""

from __future__ import annotations

from timebell.feature import Feature
from timebell.features.campaigns.feature import CampaignsFeature
from timebell.features.triggers.feature import TriggersFeature

FEATURES: tuple[Feature, ...] = (CampaignsFeature(), TriggersFeature())
