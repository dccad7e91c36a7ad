"""Fault injection for Timebell: driver, receiver, nemesis and checker, each a process with its own ledger.

No result relies on Timebell's own statements: `intent.jsonl` has the requests, `effect.jsonl` the deliveries,
`fault.jsonl` the faults, and `oracle.py` computes the instants that had to fire.
"""
