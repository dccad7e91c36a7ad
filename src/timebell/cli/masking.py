"""No secret of this process gets into its logs, whoever wrote the line: a library, an error, a handler."""

from __future__ import annotations

import re
from collections.abc import Iterable

from timebell.settings import NAMES, Settings

HIDDEN = "***"
SHORTEST = 6  # what is shorter is in too many other words
# A password in any address, a key of ours, a signing secret, an authorization.
_FORMS = (
    (re.compile(r"(?<=://)([^\s/:@]*):[^\s/@]+@"), rf"\1:{HIDDEN}@"),
    (re.compile(r"(?<=[?&])(passw(?:or)?d)=[^\s&'\"]+", re.IGNORECASE), rf"\1={HIDDEN}"),
    (re.compile(r"\b(tb_[a-z]+_[0-9a-f]{4,12})_[0-9a-f]{16,}"), rf"\1_{HIDDEN}"),
    (re.compile(r"\bwhsec_[A-Za-z0-9+/=_-]{8,}"), f"whsec_{HIDDEN}"),
    (re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE), rf"\1 {HIDDEN}"),
)


class Mask:
    """Hides the values of the settings that are secret, and what has the form of a secret."""

    def __init__(self, settings: Settings | None = None) -> None:
        values = [] if settings is None else list(_secrets(settings))
        longest_first = sorted(set(values), key=len, reverse=True)
        self._own = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def __call__(self, text: str) -> str:
        """The text without them."""
        if self._own is not None:
            text = self._own.sub(HIDDEN, text)
        for form, instead in _FORMS:
            text = form.sub(instead, text)
        return text


def _secrets(settings: Settings) -> Iterable[str]:
    for name, about in NAMES.items():
        value = getattr(settings, name)
        if about["kind"] != "secret" or not value:
            continue
        for part in (value, *re.split(r"[\s,]+", value)):
            if len(part) >= SHORTEST and "://" not in part:
                yield part
            elif name == "alert_urls":  # of a service's address all is secret
                yield part.partition("://")[2]
            yield from (found for found in re.findall(r"://[^\s/:@]*:([^\s@]+)@", part) if len(found) >= SHORTEST)
