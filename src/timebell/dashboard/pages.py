"""The pages that a feature adds to the dashboard."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fastapi import APIRouter

from timebell.feature import Feature
from timebell.store.audit.overview import AttentionItem

if TYPE_CHECKING:
    from timebell.dashboard.views import View


class NavigationEntry(NamedTuple):
    """A link of the navigation; `icon` is an SVG path, `role` the required role."""

    key: str
    url: str
    label: str
    role: str
    icon: str


class Notice(NamedTuple):
    """An item that needs attention as the overview shows it; `style` and `icon` are those of the macro `note`."""

    style: str
    icon: str
    url: str
    title: str
    text: str


class SearchHit(NamedTuple):
    """A hit of the search: its name, its URL, and what it is."""

    label: str
    url: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """The pages of a feature, and their places in the pages of the core.

    `templates` is the folder of its templates, `done_messages` are messages after a form by the value of `did`,
    `describe_attention` renders an item of `Feature.read_status`, and `search` finds objects by a part of their name.
    """

    routers: Sequence[APIRouter]
    templates: Path
    navigation: NavigationEntry
    done_messages: Mapping[str, str] = field(default_factory=dict)
    describe_attention: Callable[[AttentionItem], Notice] | None = None
    search: Callable[[View, str], Awaitable[list[SearchHit]]] | None = None


@cache
def pages_of(features: tuple[Feature, ...]) -> Mapping[Feature, Pages]:
    """Return the pages of the features that have any."""
    return {feature: import_module(feature.pages).PAGES for feature in features if feature.pages is not None}
