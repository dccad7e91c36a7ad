"""The features of the product. Only this module and the composition roots know them; see `timebell.feature`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from timebell.feature import Feature
from timebell.features.campaigns.feature import CampaignsFeature
from timebell.features.triggers.feature import TriggersFeature

if TYPE_CHECKING:
    from timebell.settings import Settings

FEATURES: tuple[Feature, ...] = (CampaignsFeature(), TriggersFeature())


def enabled_features(settings: Settings) -> tuple[Feature, ...]:
    """Return the features that the settings enable: by default all."""
    names = settings.features.split(",")
    return tuple(feature for feature in FEATURES if feature.name in names)
