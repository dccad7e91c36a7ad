"""How far long work has come: a bar on a terminal, a line every ten seconds otherwise, always on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from timebell.cli.output import say
from timebell.clock import Clock

EVERY = 10.0


@contextmanager
def progress(title: str, total: int, clock: Clock) -> Iterator[Callable[[int, int, int], None]]:
    """Yields `advance(done, lines, refused)`: how much of `total` is done, and what that was."""
    began = told = clock.monotonic()
    if sys.stderr.isatty():
        with _bar(title, total, lambda: clock.monotonic() - began) as advance:
            yield advance
        return

    def line(done: int, lines: int, refused: int) -> None:
        nonlocal told
        now = clock.monotonic()
        if now - told >= EVERY:
            told = now
            percent = 100 * done / total if total else 0
            say(f"{title}  {percent:.0f} %  {lines:,} lines  {lines / (now - began):,.0f}/s  {refused:,} refused")

    yield line


@contextmanager
def _bar(title: str, total: int, elapsed: Callable[[], float]) -> Iterator[Callable[[int, int, int], None]]:
    import click

    def said(counts: tuple[int, int] | None) -> str | None:
        if counts is None:
            return None
        lines, refused = counts
        return f"{lines:,} lines  {lines / (elapsed() or 1):,.0f}/s  {refused:,} refused"

    with click.progressbar(length=total, label=title, file=sys.stderr, item_show_func=said) as bar:

        def advance(done: int, lines: int, refused: int) -> None:
            bar.update(done - bar.pos, (lines, refused))

        yield advance
