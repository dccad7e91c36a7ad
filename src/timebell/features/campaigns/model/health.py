"""Error counts of a campaign, and the decision to pause it automatically. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MIN_SAMPLE = 100
"""Results that are needed before the error share can pause a campaign."""
MAX_SAMPLE = 1000
"""The sample is halved beyond this size, so that recent results outweigh older ones."""
MAX_CODES = 30


@dataclass(slots=True)
class Health:
    """Error codes of all results, and a sample of the recent ones.

    A result has `failed` if the provider refuses the message for another reason than a dead token: those are a normal
    part of every list. Unknown results do not count either, because the sender slows down until they end.
    """

    codes: dict[str, int] = field(default_factory=dict)
    sample: int = 0
    failed: int = 0

    def add(self, codes: Iterable[str], sample: int, failed: int) -> None:
        """Count the error codes of some results, `sample` of which are final and `failed` of those are failures."""
        counted = Counter(self.codes)
        counted.update(codes)
        self.codes = dict(counted.most_common(MAX_CODES))
        self.sample, self.failed = self.sample + sample, self.failed + failed
        if self.sample > MAX_SAMPLE:
            self.sample, self.failed = self.sample // 2, self.failed // 2

    def exceeds(self, max_error_rate: float) -> bool:
        """Return whether the share of failures among the recent results is above `max_error_rate` (0 to 1)."""
        return self.sample >= MIN_SAMPLE and self.failed > max_error_rate * self.sample

    def describe_codes(self) -> str | None:
        """Return the most frequent error codes: `480 SENDER_ID_MISMATCH, 3 UNREGISTERED`; None without errors."""
        most_frequent = Counter(self.codes).most_common(3)
        return ", ".join(f"{count:,} {code}" for code, count in most_frequent) or None

    def describe_sample(self) -> str:
        """Return the share of failures among the recent results, and the most frequent error code."""
        code = max(self.codes, key=lambda code: self.codes[code], default="")
        return f"{self.failed:,} of the last {self.sample:,} messages refused" + (f" ({code})" if code else "")

    def reset_sample(self) -> None:
        """Forget the recent results, after a person has resumed the campaign."""
        self.sample = self.failed = 0

    def to_json(self) -> dict[str, Any]:
        """Return the stored JSON form."""
        return {"codes": self.codes, "sample": self.sample, "failed": self.failed}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any] | None) -> Health:
        """Parse the stored JSON form."""
        return cls() if not stored else cls(dict(stored["codes"]), stored["sample"], stored["failed"])
