"""`python -m timebell_torture ROLE DIR`: one process of a run. `timebell torture` starts them."""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module

from timebell_torture.plan import load_plan, terminate_with_parent


def main() -> None:
    """Run the role that the first argument names, for the run in the folder of the second."""
    role, out = sys.argv[1:3]
    terminate_with_parent()
    module = import_module(f"timebell_torture.{role}")
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        runner.run(module.main(load_plan(out)))


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop of uvloop if it is installed, because the proxies carry all database traffic."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.new_event_loop()
    return new_event_loop()


if __name__ == "__main__":
    main()
