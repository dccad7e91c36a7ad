"""`python -m timebell.torture ROLE DIR`: one process of a run. `timebell torture` starts them."""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module

from timebell.torture.plan import end_with_parent, load


def main() -> None:
    """As the role that the first argument names."""
    role, out = sys.argv[1:3]
    end_with_parent()
    module = import_module(f"timebell.torture.{role}")
    with asyncio.Runner(loop_factory=_loop) as runner:
        runner.run(module.main(load(out)))


def _loop() -> asyncio.AbstractEventLoop:
    """uvloop's, where there is one: all that the proxies hold goes through it."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.new_event_loop()
    return new_event_loop()


if __name__ == "__main__":
    main()
