"""Gradients in an all-reduced bucket."""

import torch
from torch import nn

from ringspark.estimators.parallel.data.gradient_buckets import GradientBucket


def test_a_gradient_that_only_other_ranks_have_is_zeros_here_and_one_that_none_has_is_none():
    parameters = {name: nn.Parameter(torch.zeros(2)) for name in ("here", "there", "nowhere")}
    bucket = GradientBucket(parameters)
    for parameter in parameters.values():
        parameter.grad = torch.ones(2)
    bucket.take()
    bucket.give()
    parameters["there"].grad = parameters["nowhere"].grad = None
    bucket.take()
    # Simulates an all-reduce with a rank that has only the gradient of "there".
    bucket.buffer += torch.tensor([0.0, 0.0, 5.0, 5.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    bucket.give()
    assert [p.grad is None or p.grad.tolist() for p in parameters.values()] == [[1.0, 1.0], [5.0, 5.0], True]
