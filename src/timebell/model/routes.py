"""Topics, and routes: the kinds of jobs that a node can run.

The route of a job is its topic; or, for targets that need no handler, the kind such as `@http` or `@command`; or
`@http:named` for named targets, which only a node with the secret key can deliver.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from timebell.errors import InvalidInput

COMPLETE_UNHANDLED: dict[str, Any] = {"kind": "handler", "options": {"on_unhandled": "complete"}}
"""The target of a handler job that completes, instead of being held, if no live node handles its topic when due."""
COMPLETE_UNHANDLED_JSON = '{"kind":"handler","options":{"on_unhandled":"complete"}}'
"""The stored form of COMPLETE_UNHANDLED."""
_TOPIC = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", re.ASCII)


class InternalTarget(dict[str, Any]):
    """The stored form of a target that only Timebell's own code can specify.

    Targets in requests are plain mappings, so they cannot have its kind.
    """


def route_for(topic: str, target: Mapping[str, Any] | None) -> str:
    """Return the route of a job with this topic and target (None: the topic's handlers)."""
    if target is None or target == COMPLETE_UNHANDLED:
        return topic
    return named_target_route(target["kind"]) if "name" in target else f"@{target['kind']}"


def named_target_route(kind: str) -> str:
    """Return the route of jobs for named targets of this kind."""
    return f"@{kind}:named"


def named_target(kind: str, name: str) -> dict[str, Any]:
    """Return a named target as stored with a job or schedule; its options are looked up before each delivery."""
    return {"kind": kind, "name": name}


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes that a node handles: exact routes, topic prefixes such as `billing.`, or every topic.

    With `tenant_id`, only for the jobs of this tenant.
    """

    exact: frozenset[str] = frozenset()
    prefixes: frozenset[str] = frozenset()
    all_topics: bool = False
    tenant_id: str | None = None

    def __bool__(self) -> bool:
        return bool(self.exact or self.prefixes or self.all_topics)

    def __or__(self, other: Routes) -> Routes:
        """Return the routes of both, for jobs of any tenant."""
        return Routes(self.exact | other.exact, self.prefixes | other.prefixes, self.all_topics or other.all_topics)

    def handles(self, route: str) -> bool:
        """Return whether a job with this route can run here."""
        if route in self.exact or (self.all_topics and not route.startswith("@")):
            return True
        return any(route.startswith(prefix) for prefix in self.prefixes)

    def nearest(self, topic: str) -> str | None:
        """Return the most similar topic that is handled here: one of the two may be misspelled."""
        topics = [route for route in self.exact if not route.startswith("@")]
        return next(iter(get_close_matches(topic, topics, 1)), None)

    def to_json(self) -> dict[str, Any]:
        """Return the routes as JSON."""
        return {"exact": sorted(self.exact), "prefixes": sorted(self.prefixes), "allTopics": self.all_topics}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Routes:
        """Return the routes that `to_json` describes."""
        return cls(frozenset(fields["exact"]), frozenset(fields["prefixes"]), fields["allTopics"])

    @lru_cache(maxsize=256)  # noqa: B019 - a node has two or three instances
    def sql_params(self) -> dict[str, Any]:
        """Return the parameters of the SQL condition that selects these routes."""
        return {
            "exact": sorted(self.exact), "prefixes": sorted(self.prefixes), "everything": self.all_topics,
            "only_tenant": self.tenant_id,
        }  # fmt: skip


ALL_ROUTES = Routes(prefixes=frozenset({"@"}), all_topics=True)
"""Every route."""


def check_pattern(pattern: str) -> str:
    """Return the pattern if it is a topic, `prefix.*` or `*`. Raises InvalidInput (INVALID_TOPIC)."""
    if isinstance(pattern, str) and pattern.endswith(".") and _TOPIC.fullmatch(pattern[:-1]):
        raise InvalidInput(
            f"{pattern!r:.100} is not a topic.",
            code="INVALID_TOPIC",
            fix=f'Write "{pattern}*" for all topics below it.',
        )
    if pattern != "*":
        check_topic(pattern.removesuffix(".*") if isinstance(pattern, str) else pattern)
    return pattern


def check_topic(topic: str) -> str:
    """Return the topic if it is valid: a dotted name of letters, digits, `_` and `-`, at most 200 characters.

    Raises InvalidInput (INVALID_TOPIC).
    """
    if not isinstance(topic, str) or len(topic) > 200 or not _TOPIC.fullmatch(topic):
        raise InvalidInput(
            f"{topic!r:.100} is not a topic.", code="INVALID_TOPIC",
            fix="Topics are dotted names of letters, digits, _ and -, such as billing.invoice-due.",
        )  # fmt: skip
    return topic
