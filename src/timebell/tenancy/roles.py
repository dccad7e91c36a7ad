"""Roles, in ascending order: each includes the permissions of the previous one."""

from __future__ import annotations

from enum import StrEnum

from timebell.errors import Refused


class Role(StrEnum):
    """Permission level, from read-only access to full access to every tenant."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    EDITOR = "editor"
    ADMIN = "admin"
    PLATFORM = "platform"

    def covers(self, needed: Role) -> bool:
        """Return whether this role includes the permissions of `needed`."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


def require(role: Role, needed: Role) -> None:
    """Require at least the role `needed`. Raises Refused (ROLE_TOO_LOW)."""
    if not role.covers(needed):
        raise Refused(
            f"This requires the role {needed}; yours is {role}.", code="ROLE_TOO_LOW",
            fix="Ask an admin for that role, or for a key that has it.",
        )  # fmt: skip
