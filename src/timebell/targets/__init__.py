"""Targets: where due jobs are delivered. A target returns an outcome and never accesses the store or settings.

`http`, `command` and the brokers are imported only when used, so that importing this package stays cheap.
"""

from timebell.targets.base import Delivery, Outcome, Target

__all__ = ["Delivery", "Outcome", "Target"]
