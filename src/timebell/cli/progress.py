"""Progress of a long command on stderr: a bar on a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from timebell.cli.output import print_message
from timebell.clock import Clock

PROGRESS_INTERVAL_SECONDS = 10.0


@contextmanager
def progress(title: str, total: int, clock: Clock) -> Iterator[Callable[[int, int, int], None]]:
    """Yield `advance(done, lines, refused)`, to be called with the part of `total` done so far and the counts."""
    started = last_printed = clock.monotonic()
    if sys.stderr.isatty():
        with _bar(title, total, lambda: clock.monotonic() - started) as advance:
            yield advance
        return

    def print_line(done: int, lines: int, refused: int) -> None:
        nonlocal last_printed
        now = clock.monotonic()
        if now - last_printed >= PROGRESS_INTERVAL_SECONDS:
            last_printed = now
            percent = 100 * done / total if total else 0
            print_message(
                f"{title}  {percent:.0f} %  {lines:,} lines  {lines / (now - started):,.0f}/s  {refused:,} refused"
            )

    yield print_line


@contextmanager
def _bar(title: str, total: int, elapsed: Callable[[], float]) -> Iterator[Callable[[int, int, int], None]]:
    import click

    def describe(counts: tuple[int, int] | None) -> str | None:
        if counts is None:
            return None
        lines, refused = counts
        return f"{lines:,} lines  {lines / (elapsed() or 1):,.0f}/s  {refused:,} refused"

    with click.progressbar(length=total, label=title, file=sys.stderr, item_show_func=describe) as bar:

        def advance(done: int, lines: int, refused: int) -> None:
            bar.update(done - bar.pos, (lines, refused))

        yield advance
