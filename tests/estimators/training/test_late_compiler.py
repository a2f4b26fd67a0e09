"""Creating an optimizer does not import torch's compiler; its import restores torch's own code."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import torch
from ringspark.estimators.training.optimizers.registry import (
    OPTIMIZERS,
    defer_compiler_import,
    make_optimizer,
)

def is_loaded():
    return "torch._dynamo" in sys.modules

loaded = {}
for name in OPTIMIZERS:
    defer_compiler_import()
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = make_optimizer(name, [weight], 0.1, 0.0)
    weight.grad = torch.ones(2, 2)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    assert weight.grad is None
    loaded[name] = is_loaded()
import torch._dynamo
zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__
ours = zero_grad.__dynamo_disable
weight.grad = torch.ones(2, 2)
optimizer.zero_grad()
assert weight.grad is None
loaded["ours stays"] = zero_grad.__dynamo_disable is ours
print(json.dumps(loaded))
"""


@pytest.mark.extras
def test_no_optimizer_imports_the_compiler_before_its_first_step() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert len(loaded) > 10
    assert not any(loaded.values()), loaded
