"""The network as a list of torch's operations.

In a logged model, copies of `ringspark.models.program` and `ringspark.models.operators` replace this file.
"""

from __future__ import annotations

from ringspark.models.program import Program

__all__ = ["Program"]
