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
    asyncio.run(module.main(load(out)))


if __name__ == "__main__":
    main()
