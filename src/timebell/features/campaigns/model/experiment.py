"""Variants of a message, and recipients that get none, for comparison. Pure.

The choice depends only on the user and the campaign: all devices of a user get the same variant, also in a retry, and
in every occurrence of a recurring campaign.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from timebell.errors import InvalidInput

MAX_VARIANTS = 10
MAX_NAME_LENGTH = 20
MAX_HOLD_OUT = 0.9
TEXT_FIELDS = ("title", "body", "image", "data", "translations")
"""Fields of the message that a variant may replace."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of a message: it replaces `texts`, by the names of TEXT_FIELDS, for `share` of the recipients."""

    name: str
    share: float
    texts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"name": self.name, "share": self.share, **self.texts}


@dataclass(frozen=True, slots=True)
class Experiment:
    """The variants of a message; none: all get the same. `hold_out` is the share of the recipients that get none."""

    variants: tuple[Variant, ...] = ()
    hold_out: float = 0.0

    def is_held_out(self, seed: str, recipient: str) -> bool:
        """Return whether a recipient gets no message."""
        return self.hold_out > 0 and _fraction(seed, recipient) < self.hold_out

    def choose_variant(self, seed: str, recipient: str) -> Variant | None:
        """Return the variant of a recipient; None if there are none."""
        if not self.variants:
            return None
        rest = (_fraction(seed, recipient) - self.hold_out) / (1 - self.hold_out)
        for variant in self.variants:
            rest -= variant.share
            if rest < 0:
                return variant
        return self.variants[-1]


def parse_experiment(variants: Any, hold_out: Any) -> Experiment:
    """Parse the options `variants` and `holdOut`; None means none. Raises InvalidInput (INVALID_CAMPAIGN)."""
    if hold_out is None:
        hold_out = 0
    if not isinstance(hold_out, int | float) or isinstance(hold_out, bool) or not 0 <= hold_out <= MAX_HOLD_OUT:
        raise _invalid(f"holdOut is {hold_out!r:.60}; it must be a fraction from 0 to {MAX_HOLD_OUT}, such as 0.1")
    return Experiment(_parse_variants(variants) if variants else (), float(hold_out))


def _parse_variants(variants: Any) -> tuple[Variant, ...]:
    if not isinstance(variants, Sequence) or not 2 <= len(variants) <= MAX_VARIANTS:
        raise _invalid(f"variants must be a list of 2 to {MAX_VARIANTS} variants")
    if not all(isinstance(each, Mapping) for each in variants):
        raise _invalid('A variant must be like {"name": "B", "share": 0.5, "title": "..."}')
    if len({"share" in each for each in variants}) > 1:
        raise _invalid("Some variants have a share and others do not")
    parsed = tuple(_parse_variant(each, 1 / len(variants)) for each in variants)
    if len({variant.name for variant in parsed}) < len(parsed):
        raise _invalid("Two variants have the same name")
    if abs(sum(variant.share for variant in parsed) - 1) > 0.001:
        raise _invalid("The shares of the variants do not add up to 1")
    return parsed


def _parse_variant(variant: Mapping[str, Any], default_share: float) -> Variant:
    name, share = variant.get("name"), variant.get("share", default_share)
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH or "\0" in name:
        raise _invalid(f"The name of a variant is {name!r:.60}; use up to {MAX_NAME_LENGTH} characters, such as A")
    if unknown := variant.keys() - {"name", "share", *TEXT_FIELDS}:
        raise _invalid(f"The variant {name} has a field {min(unknown)!r:.60}; allowed are {', '.join(TEXT_FIELDS)}")
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share < 1:
        raise _invalid(f"The share of the variant {name} is {share!r:.60}; it must be a fraction such as 0.5")
    texts = {field: variant[field] for field in TEXT_FIELDS if variant.get(field) is not None}
    return Variant(name, float(share), texts)


def _fraction(seed: str, recipient: str) -> float:
    """Return a number in [0, 1) that is the same for the same recipient, and evenly distributed."""
    return int.from_bytes(sha256(f"{seed}:{recipient}".encode()).digest()[:8], "big") / 2**64


def _invalid(problem: str) -> InvalidInput:
    return InvalidInput(f"{problem}.", code="INVALID_CAMPAIGN", fix="See docs/guides/campaigns.md.")
