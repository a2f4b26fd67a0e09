r"""Runs packages that no environment has; first `pip install --target FOLDER --no-deps bitsandbytes==0.50.2
msgspec==0.22.0 pytorch_optimizer==4.1.0 jsonargparse==4.53.0`.

    $ PYTHONPATH=FOLDER python -W ignore packages.py
    Adam8bit on a CPU 0.9990000128746033
    Adam8bit on fake tensors DataDependentOutputException
    LAMB, a bias after 20 steps, pytorch_optimizer -0.44954216480255127
    LAMB, a bias after 20 steps, ringspark -0.1999800205230713
    LAMB, a bias after 20 steps, AdamW -0.19999980926513672
    LARS, rates 1 and 0, pytorch_optimizer 0.9990000128746033
    LARS, rates 1 and 0, ringspark 0.9981000423431396
    SM3 {'momentum_buffer': (8, 8), 'accumulator_0': (8, 1), 'accumulator_1': (1, 8)}
    Job(name='a', epochs=1)
    'job:\n  name: no\n' Parser key "job.name": Expected a <class 'str'>. Got value: False
    'job:\n  epochs: 1\n  epochs: 2\n' Namespace(name='a', epochs=2)
    'job:\n  epochs: x\n' Parser key "job.epochs": Expected a <class 'int'>. Got value: x
"""

from dataclasses import dataclass
from pathlib import Path

import bitsandbytes
import jsonargparse
import msgspec
import pytorch_optimizer
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ringspark.extras.optimizers.lamb import Lamb
from ringspark.extras.optimizers.lars import Lars


def adam8bit():
    weight = nn.Parameter(torch.ones(8192))
    weight.grad = torch.ones(8192)
    bitsandbytes.optim.Adam8bit([weight]).step()
    return weight[0].item()


print("Adam8bit on a CPU", adam8bit())
try:
    with FakeTensorMode():
        adam8bit()
except Exception as error:
    print("Adam8bit on fake tensors", type(error).__name__)


def train(make, shape, rates=(0.01,) * 20):
    weight = nn.Parameter(torch.ones(shape) if len(shape) > 1 else torch.zeros(shape))
    optimizer = make([weight])
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.full(shape, 0.01)
        optimizer.step()
    return weight.flatten()[0].item(), optimizer.state[weight]


for name, make in (
    ("pytorch_optimizer", pytorch_optimizer.Lamb),
    ("ringspark", Lamb),
    ("AdamW", torch.optim.AdamW),
):
    print(
        "LAMB, a bias after 20 steps,",
        name,
        train(lambda p, make=make: make(p, lr=0.01, weight_decay=0.0), (8,))[0],
    )
for name, make in (("pytorch_optimizer", pytorch_optimizer.LARS), ("ringspark", Lars)):
    print("LARS, rates 1 and 0,", name, train(lambda p, make=make: make(p, lr=1.0), (8, 8), (1.0, 0.0))[0])
state = train(lambda p: pytorch_optimizer.SM3(p, lr=0.01), (8, 8))[1]
print("SM3", {key: tuple(value.shape) for key, value in state.items()})


@dataclass
class Job:
    name: str = "a"
    epochs: int = 1


print(msgspec.convert({"epoch": 5}, Job))
for text in ("job:\n  name: no\n", "job:\n  epochs: 1\n  epochs: 2\n", "job:\n  epochs: x\n"):
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Job, "job")
    parser.add_argument("--file", action="config")
    Path("job.yaml").write_text(text)
    try:
        print(repr(text), parser.parse_args(["--file", "job.yaml"]).job)
    except jsonargparse.ArgumentError as error:
        print(repr(text), " ".join(str(error).split()))
