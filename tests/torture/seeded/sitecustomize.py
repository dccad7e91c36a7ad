"""Seed the bug that SEEDED_BUG names into the nodes and the driver of a torture run, when Python starts.

SEEDED_OVERRIDES contains settings and module attributes for the processes of the run. Only `tests/torture/bugs.py` puts
this folder on the PYTHONPATH of the processes that it starts.
"""

import importlib
import json
import os
import sys
import traceback
from datetime import timedelta

seeded = None
arguments = sys.orig_argv
if arguments[2:3] == ["timebell_torture"]:
    role = arguments[3]
else:
    role = "node" if "timebell_torture.app:app" in arguments else None
overrides = json.loads(os.environ.get("SEEDED_OVERRIDES", "{}"))
if role == "node":
    os.environ["TIMEBELL_WORKER_DRAIN_TIMEOUT"] = "2s"  # do not wait for long handlers
    os.environ.update(overrides.get(os.environ.get("TIMEBELL_NODE_NAME", ""), {}))
try:
    for target, value in overrides.get(role, {}).items():
        module_name, _, name = target.partition(":")
        module = importlib.import_module(module_name)
        setattr(module, name, timedelta(seconds=value) if isinstance(getattr(module, name), timedelta) else value)
    if role == "driver":  # keeps its priority, because these runs do not judge lateness
        importlib.import_module("timebell_torture.driver").lower_priority = lambda: None
    if "SEEDED_BUG" in os.environ and role in ("node", "driver"):
        from tests.torture.mutants import MUTANTS

        bug = os.environ["SEEDED_BUG"]
        seeded = next(mutant for mutant in MUTANTS if mutant.name == bug).seeded()  # a reference keeps the bug active
        seeded.__enter__()
        print(f"seeded: {bug}", file=sys.stderr, flush=True)
except BaseException:
    traceback.print_exc()
    os._exit(70)  # Python would otherwise continue without the bug
