"""The engine of a node: planner, worker, heartbeat, and the chores of the leader."""
