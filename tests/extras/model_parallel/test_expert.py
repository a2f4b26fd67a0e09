"""What expert parallelism refuses; `test_spread_worker` trains it like one worker."""

from typing import Any

import pytest
from torch import nn

from ringspark.estimators.options.mesh import AXES, Mesh
from ringspark.extras.experts.layer import Experts
from ringspark.extras.model_parallel.expert import shard_experts
from ringspark.extras.model_parallel.fake_collective import FakeCollective
from ringspark.extras.model_parallel.shard_network import check_shardable
from ringspark.models import ModelSpec


def _network() -> nn.Module:
    sizes = {"vocab_size": 13, "max_seq_len": 6, "dim": 8, "depth": 4, "num_heads": 2, "out_features": 3}
    return ModelSpec("transformer_classifier", {**sizes, "experts": {"num_experts": 5}}).build()


def test_a_network_without_enough_experts_is_refused() -> None:
    seat: Any = FakeCollective(0, 6)
    with pytest.raises(
        ValueError, match=r"'expert' 6 workers, more than the 5 experts of 'blocks\.1\.mixture'"
    ):
        shard_experts(_network(), seat)
    with pytest.raises(ValueError, match="needs a mixture of experts, and Linear has none; give the model"):
        shard_experts(nn.Linear(2, 2), seat)


def test_a_hook_on_experts_that_get_other_rows_is_refused() -> None:
    network = _network()
    experts = next(layer for layer in network.modules() if isinstance(layer, Experts))
    experts.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="have a forward hook, which would see rows of other workers"):
        check_shardable(network, dict.fromkeys(AXES, 1) | {"expert": 2}, Mesh())
