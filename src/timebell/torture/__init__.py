"""The fault test of the guarantees: driver, sink, nemesis and checker, each a process with a ledger of its own.

Nothing here takes the product's word for anything: what was asked is in `intent.jsonl`, what arrived in
`effect.jsonl`, what was broken in `fault.jsonl`, and the instants that should have fired come from `oracle.py`.
"""
