"""Context parallelism: each rank has a part of every row's tokens, and all weights.

Only attention mixes tokens; `CONTEXTS` has one class per way to attend across ranks.
"""

from ringspark.extras.model_parallel.sequence.all_gather_keys import AllGatherKeys
from ringspark.extras.model_parallel.sequence.context import Context
from ringspark.extras.model_parallel.sequence.ring import Ring
from ringspark.extras.model_parallel.sequence.ulysses import Ulysses

CONTEXTS: dict[str, type[Context]] = {"gather": AllGatherKeys, "ring": Ring, "ulysses": Ulysses}

__all__ = ["CONTEXTS", "AllGatherKeys", "Context", "Ring", "Ulysses"]
