"""Mask the secrets of this process in logs and stored errors, also in messages of libraries and handlers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from timebell.settings import SETTINGS, Settings

REPLACEMENT = "***"
MIN_SECRET_LENGTH = 6  # a shorter secret would match parts of ordinary words
# A password in a URL or its query, an API key, a signing secret, an Authorization header.
_SECRET_PATTERNS = (
    (re.compile(r"(?<=://)([^\s/:@]*):[^\s/@]+@"), rf"\1:{REPLACEMENT}@"),
    (re.compile(r"(?<=[?&])(passw(?:or)?d)=[^\s&'\"]+", re.IGNORECASE), rf"\1={REPLACEMENT}"),
    (re.compile(r"\b(tb_[a-z]+_[0-9a-f]{4,12})_[0-9a-f]{16,}"), rf"\1_{REPLACEMENT}"),
    (re.compile(r"\bwhsec_[A-Za-z0-9+/=_-]{8,}"), f"whsec_{REPLACEMENT}"),
    (re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE), rf"\1 {REPLACEMENT}"),
)


class Mask:
    """Replace the values of secret settings, and text in the format of a secret, with `***`."""

    def __init__(self, settings: Settings | None = None) -> None:
        values = [] if settings is None else list(_secret_values(settings))
        longest_first = sorted(set(values), key=len, reverse=True)
        self._own_secrets = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def __call__(self, text: str) -> str:
        """Return the text with all secrets replaced."""
        if self._own_secrets is not None:
            text = self._own_secrets.sub(REPLACEMENT, text)
        for pattern, replacement in _SECRET_PATTERNS:
            text = pattern.sub(replacement, text)
        return text


def _secret_values(settings: Settings) -> Iterable[str]:
    for name, spec in SETTINGS.items():
        value = getattr(settings, name)
        if spec["kind"] != "secret" or not value:
            continue
        for part in (value, *re.split(r"[\s,]+", value)):
            if len(part) >= MIN_SECRET_LENGTH and "://" not in part:
                yield part
            elif name == "alert_urls":  # every part of an alert URL after the scheme can be secret
                yield part.partition("://")[2]
            yield from (
                password
                for password in re.findall(r"://[^\s/:@]*:([^\s@]+)@", part)
                if len(password) >= MIN_SECRET_LENGTH
            )
