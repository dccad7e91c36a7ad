"""Roles: each may do all that the one before it may."""

from __future__ import annotations

from enum import StrEnum

from timebell.errors import Refused


class Role(StrEnum):
    """What a key may do, from reading to everything in every tenant."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    EDITOR = "editor"
    ADMIN = "admin"
    PLATFORM = "platform"

    def covers(self, needed: Role) -> bool:
        """Whether one who has this role may do what asks for `needed`."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


def require(has: Role, needed: Role) -> None:
    """Raises Refused (ROLE_TOO_LOW)."""
    if not has.covers(needed):
        raise Refused(
            f"This needs the role {needed}, and the key has {has}.", code="ROLE_TOO_LOW",
            fix="Ask an admin for a key with that role.",
        )  # fmt: skip
