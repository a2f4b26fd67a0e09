"""The network as a list of torch's operations.

In a logged model this file is `ringspark.models.program`, next to `ringspark.models.operators`.
"""

from __future__ import annotations

from ringspark.models.program import Program

__all__ = ["Program"]
