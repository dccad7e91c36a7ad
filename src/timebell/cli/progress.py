"""Progress of a long command on stderr, and its summary after Ctrl-C.

On a terminal, progress is a bar or a line that is rewritten; otherwise a line every ten seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from timebell.cli.output import print_message
from timebell.clock import Clock, SystemClock

PROGRESS_INTERVAL_SECONDS = 10.0
TERMINAL_INTERVAL_SECONDS = 0.1


@contextmanager
def explain_interrupt(describe: Callable[[], str]) -> Iterator[None]:
    """After Ctrl-C, print how far the command came and whether repeating it is safe."""
    try:
        yield
    except KeyboardInterrupt:
        print_message(f"Interrupted. {describe()}")
        raise


@contextmanager
def status_line(describe_interrupt: Callable[[], str]) -> Iterator[Callable[[str], None]]:
    """Yield `show(text)`, to be called with the current state of a long command."""
    clock, is_terminal = SystemClock(), sys.stderr.isatty()
    last_shown = clock.monotonic()

    def show(text: str) -> None:
        nonlocal last_shown
        interval = TERMINAL_INTERVAL_SECONDS if is_terminal else PROGRESS_INTERVAL_SECONDS
        if (now := clock.monotonic()) - last_shown < interval:
            return
        last_shown = now
        if is_terminal:
            print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)
        else:
            print_message(text)

    with explain_interrupt(describe_interrupt):
        try:
            yield show
        finally:
            if is_terminal:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)


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
