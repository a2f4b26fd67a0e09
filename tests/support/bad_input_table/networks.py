"""Refusals of networks, of their memory, and of finetuning."""

from typing import Any

import torch
from torch import nn

from bad_input_table.place import DEEP, SPEC, BadInput, Locked, Place, unread
from ringspark.estimators import TorchEstimator, TorchRegressor, plan_memory
from ringspark.models import ModelSpec

R = BadInput


def of_two_outputs(place: Place, **changes: Any) -> Any:
    return place.train(TorchEstimator, model=TwoOutputs(), **changes)


# fmt: off
NETWORKS = [
    R("model: nothing to train", lambda p: unread(p, model=nn.Flatten()),
      "Flatten has no trainable", "unfreeze some"),
    R("model: all frozen", lambda p: p.train(model=frozen()),
      "Linear has no trainable parameters", "unfreeze some"),
    R("model: other inputs",
      lambda p: p.train(model=ModelSpec("linear", {"in_features": 5, "out_features": 1})),
      r"Linear cannot take the input columns \[features \(2, 2\) float32\]", "match the model"),
    R("model: more inputs", lambda p: p.train(inputCols=["features", "half"]),
      "Linear cannot take", "forward gets one argument per column"),
    R("model: other outputs",
      lambda p: p.train(TorchRegressor, model=nn.Linear(2, 3)),
      r"Linear must return \(batch,\) or \(batch, 1\) for labelCol 'label', got", "change the model's last"),
    R("model: two outputs, one label", of_two_outputs, "TwoOutputs", "labelCols"),
    R("model: cannot travel", lambda p: p.fit(model=Locked()),
      "cannot be sent to the workers", "without references"),
    R("spec: unknown name", lambda p: ModelSpec("mlpp"),
      "a model must be one of .*, got 'mlpp'", "did you mean 'mlp'"),
    R("spec: no such module", lambda p: ModelSpec("no.such:Net").build(),
      "'no.such:Net' could not be imported", "give the class"),
    R("spec: of the main script", lambda p: ModelSpec("__main__:Net"),
      "'__main__:Net' is defined in", "move the class"),
    R("spec: not JSON", lambda p: ModelSpec("mlp", {"hidden": torch.ones(1)}),
      "argument 'hidden'", "must be JSON"),
    R("spec: wrong argument", lambda p: ModelSpec("linear", {"width": 2}).build(),
      "'linear' does not take", "it takes in_features"),
    R("spec: experts that choose, causal", lambda p: with_experts(num_experts=2, router="expert_choice"),
      "router 'expert_choice' lets later tokens", "use 'switch' or 'gshard'"),
    R("spec: experts without a number", lambda p: with_experts(router="switch"),
      "experts must give num_experts", "such as"),
    R("spec: no network", lambda p: ModelSpec("json:loads").build(),
      "'json:loads' must be", "torch.nn.Module"),
    R("memory: no batch", lambda p: plan_memory(SPEC, None), "batch must be", r"\(inputs, labels\)"),
    R("memory: other shapes", lambda p: plan_memory(SPEC, columns(3)),
      "model linear cannot be planned", "check the batch"),
    R("memory: rows of two numbers", lambda p: plan_memory(SPEC, uneven()),
      "same number of rows", "first dimension"),
    R("memory: budget of no size", lambda p: plan_memory(SPEC, columns(2), budget="x"),
      "budget", "such as '4g'"),
    R("memory: unknown setting", lambda p: plan_memory(SPEC, columns(2), sharding="all"),
      "sharding", "'optimizer'"),
    R("fit: labels by two settings",
      lambda p: p.fit(TorchEstimator, labelCol="label", labelCols=["label", "half"]),
      "set labelCol or labelCols, not both", "got 'label' and"),
    R("fit: one output for two labels",
      lambda p: p.fit(TorchEstimator, labelCols=["label", "half"], predictionCols=["a", "b"]),
      r"returns 1 tensors for the labels \['label', 'half'\]", "must return one each"),
    R("fit: two outputs without names",
      lambda p: p.fit(TorchEstimator, model=TwoOutputs(), labelCols=["label", "half"],
                      loss=["mse", "mse"]),
      "the model has 2 outputs", "set predictionCols"),
    R("fit: several labels of a regressor", lambda p: p.fit(TorchRegressor, labelCols=["label", "half"]),
      "TorchRegressor has no Param 'labelCols'", "did you mean 'labelCol'", TypeError),
]
# fmt: on


def columns(width: int) -> tuple[Any, Any]:
    """Returns a batch for `plan_memory`."""
    return (((4, width), "float32"), ((4,), "float32"))


def uneven() -> tuple[Any, Any]:
    return (((4, 2), "float32"), ((5,), "float32"))


def with_experts(**experts: Any) -> nn.Module:
    sizes = {"vocab_size": 4, "max_seq_len": 4, "dim": 4, "depth": 2, "num_heads": 2}
    return ModelSpec("transformer_lm", {**sizes, "experts": experts}).build()


def frozen() -> nn.Module:
    return nn.Linear(2, 1).requires_grad_(False)


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), self.linear(x)


# fmt: off
FINETUNING = [
    R("freeze: misspelt", lambda p: unread(p, freeze="lineer.weight"),
      "'lineer.weight', which matches no parameter", "did you mean 'linear.weight'"),
    R("freeze: everything", lambda p: unread(p, freeze=["*"]),
      "freeze leaves no parameter of model Linear", "narrow its patterns"),
    R("lora: no targets", lambda p: p.fit(lora={"rank": 2}),
      "LoRA needs the option 'targets'", "it takes rank"),
    R("lora: no such layer", lambda p: unread(p, lora={"rank": 2, "targets": ["*.query"]}),
      "lora's targets: .* '.*query' matches no linear layer", "the layers are"),
    R("lora: a layer of more than W x + b",
      lambda p: p.train(model=nn.Sequential(Doubled(2, 2)), lora={"rank": 1, "targets": ["*"]}),
      r"lora's targets: layer '0' computes more than W x \+ b", "choose other layers"),
    R("pretrained: a pickle",
      lambda p: p.train(pretrained=p.prepared(damage=lambda f: (f / "pytorch_model.bin").touch())),
      "pytorch_model.bin is a pickle", "convert it once: safetensors"),
    R("pretrained: another network",
      lambda p: p.train(model=DEEP, pretrained=p.prepared("saved")),
      "is not of model MLP: it lacks 'trunk", "list the names to skip in 'ignore'"),
    R("emaDecay of 1", lambda p: p.fit(emaDecay=1.0), "emaDecay must lie", "between 0 and 1"),
]
# fmt: on


class Doubled(nn.Linear):
    """A linear layer that overrides `forward`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)
