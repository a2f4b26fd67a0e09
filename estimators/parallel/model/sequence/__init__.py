"""Long rows spread over ranks: each has a part of every row's tokens, and the whole network.

All but attention treats each token by itself, so a rank needs the others' keys and values, and nothing
else. The ways to attend across ranks are in one registry, `CONTEXTS`.
"""

from ringspark.estimators.parallel.model.sequence.context import Context
from ringspark.estimators.parallel.model.sequence.exchanged_heads import ExchangedHeads
from ringspark.estimators.parallel.model.sequence.gathered_keys import GatheredKeys
from ringspark.estimators.parallel.model.sequence.ring import Ring

CONTEXTS: dict[str, type[Context]] = {"gather": GatheredKeys, "ring": Ring, "ulysses": ExchangedHeads}

__all__ = ["CONTEXTS", "Context", "ExchangedHeads", "GatheredKeys", "Ring"]
