"""Where a due job goes. A target delivers and answers with an outcome; it never touches store or settings.

`http`, `command` and the brokers are imported only when used: this package itself stays light.
"""

from timebell.targets.base import Delivery, Outcome, Target

__all__ = ["Delivery", "Outcome", "Target"]
