"""How far long work has come: a bar on a terminal, a line every ten seconds otherwise, always on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from timebell.cli.output import say
from timebell.clock import Clock

EVERY = 10.0


@contextmanager
def progress(title: str, total: int, clock: Clock) -> Iterator[Callable[[int, int, int], None]]:
    """Yields `advance(done, lines, refused)`: how much of `total` is done, and what that was."""
    if sys.stderr.isatty():
        with _bar(title, total) as advance:
            yield advance
        return
    began = told = clock.monotonic()

    def line(done: int, lines: int, refused: int) -> None:
        nonlocal told
        now = clock.monotonic()
        if now - told >= EVERY:
            told = now
            percent = 100 * done / total if total else 0
            say(f"{title}  {percent:.0f} %  {lines:,} lines  {lines / (now - began):,.0f}/s  {refused:,} refused")

    yield line


@contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[int, int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(f"{task.fields['lines'] / (task.elapsed or 1):,.0f}/s")

    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[lines]:,} lines"),
        Rate(), TimeRemainingColumn(), TextColumn("{task.fields[refused]:,} refused"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total or None, lines=0, refused=0)

        def advance(done: int, lines: int, refused: int) -> None:
            bar.update(task, completed=done, lines=lines, refused=refused)

        yield advance
