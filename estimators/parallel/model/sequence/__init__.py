"""Context parallelism: each rank has a part of every row's tokens, and all weights.

Only attention mixes tokens; `CONTEXTS` has one class per way to attend across ranks.
"""

from ringspark.estimators.parallel.model.sequence.all_gather_keys import AllGatherKeys
from ringspark.estimators.parallel.model.sequence.context import Context
from ringspark.estimators.parallel.model.sequence.ring import Ring
from ringspark.estimators.parallel.model.sequence.ulysses import Ulysses

CONTEXTS: dict[str, type[Context]] = {"gather": AllGatherKeys, "ring": Ring, "ulysses": Ulysses}

__all__ = ["CONTEXTS", "AllGatherKeys", "Context", "Ring", "Ulysses"]
