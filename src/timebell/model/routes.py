"""What a node can take: a job's route is its topic, or `@http`, `@command` for targets that need no handler, or
`@http:named` for those under a name, which take the secret key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

COMPLETES: dict[str, Any] = {"kind": "handler", "options": {"unheard": "complete"}}
"""The target of a job for handlers that is over when it is due and no live node listens; without it, it is held."""
COMPLETES_TEXT = '{"kind":"handler","options":{"unheard":"complete"}}'
"""The same as it is stored."""


def route(topic: str, target: Mapping[str, Any] | None) -> str:
    """The route of a job of this topic and target (None: the topic's handlers)."""
    if target is None or target == COMPLETES:
        return topic
    return route_by_name(target["kind"]) if "name" in target else f"@{target['kind']}"


def route_by_name(kind: str) -> str:
    """The route of jobs for targets of this kind that have a name."""
    return f"@{kind}:named"


def named(kind: str, name: str) -> dict[str, Any]:
    """A target under a name, as a job or schedule has it; its options are looked up just before each delivery."""
    return {"kind": kind, "name": name}


@dataclass(frozen=True, slots=True)
class Routes:
    """What a node can take: exact routes, topic prefixes such as `billing.`, or every topic."""

    exact: frozenset[str] = frozenset()
    prefixes: frozenset[str] = frozenset()
    everything: bool = False

    def __bool__(self) -> bool:
        return bool(self.exact or self.prefixes or self.everything)

    def __or__(self, other: Routes) -> Routes:
        return Routes(self.exact | other.exact, self.prefixes | other.prefixes, self.everything or other.everything)

    def hears(self, route: str) -> bool:
        """Whether a job of this route can be taken."""
        if route in self.exact or (self.everything and not route.startswith("@")):
            return True
        return any(route.startswith(prefix) for prefix in self.prefixes)

    @lru_cache(maxsize=256)  # noqa: B019 - a node has two or three
    def params(self) -> dict[str, Any]:
        """The parameters of the `$hears` word."""
        return {"exact": sorted(self.exact), "prefixes": sorted(self.prefixes), "everything": self.everything}


ANYONE = Routes(prefixes=frozenset({"@"}), everything=True)
"""Every route there is."""
