"""The bugs that can be seeded into torture runs: those of the model, and others that need a server that fails over."""

from __future__ import annotations

from tests.model import mutants
from tests.model.mutants import Mutant

FAILOVER_MUTANTS = [
    Mutant("a silent database is not noticed", ((
        "store.dialects.liveness:LivenessMonitor.watch", "is None:", "is Ellipsis:",
    ),)),
    Mutant("results are dropped on a read-only database", ((
        "store.dialects.postgres.errors:classify", "if state in POSTGRES_STATES:",
        "if state == '25006':\n        return None\n    if state in POSTGRES_STATES:",
    ),)),
    Mutant("commits do not wait for standbys", ((
        "store.dialects.postgres.connections:engine_for", "{**settings,", '{**settings, "synchronous_commit": "off",',
    ),)),
    Mutant("lost writes are not noticed", ((
        "engine.history_check:check_history", "if not recent.is_unverified:", "if True:",
    ),)),
]  # fmt: skip
MUTANTS = [*mutants.MUTANTS, *FAILOVER_MUTANTS]
