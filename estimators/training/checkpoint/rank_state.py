"""What each rank has for itself in a checkpoint: random numbers, buffers, sums of the epoch, callbacks.

It travels to the other ranks as JSON and safetensors. As many ranks as before take their own back, to the
bit; another number of them sums up what the epoch has seen so far on rank 0, takes rank 0's buffers and
callbacks, and seeds its random numbers anew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.training.callbacks import Callbacks, TrainingState
from ringspark.estimators.training.objective.loss_sums import Totals
from ringspark.estimators.training.objective.metric_set import MetricSet
from ringspark.models.generators import Tensors, random_state, seed_anew, set_random_state


@dataclass(kw_only=True)
class RankParts:
    """The objects of one rank whose state this is."""

    module: nn.Module
    totals: Totals
    metrics: Sequence[MetricSet]
    callbacks: Callbacks
    state: TrainingState
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank's state: tensors on the CPU, and values that JSON has."""

    tensors: Tensors
    values: dict[str, Any]

    @classmethod
    def of(cls, parts: RankParts) -> RankState:
        """A copy of the present state.

        Raises:
            ValueError: A callback's state has no JSON form.
        """
        tensors, plain = random_state(parts.device)
        result = {f"random/{name}": tensor for name, tensor in tensors.items()}
        result["totals"] = parts.totals.state()
        for name, buffer in parts.module.named_buffers():
            result[f"buffers/{name}"] = buffer.detach().to("cpu", copy=True).contiguous()
        for index, metric_set in enumerate(parts.metrics):
            for number, states in enumerate(metric_set.states()):
                for key, state in states.items():
                    result[f"metrics/{index}/{number}/{key}"] = state
        values = {
            "random": plain,
            "callbacks": parts.callbacks.state_dicts(),
            "stop_reason": parts.state.stop_reason,
        }
        return cls(tensors=result, values=values)

    def section(self, prefix: str) -> Tensors:
        """The tensors "<prefix>/<name>" by name."""
        start = f"{prefix}/"
        return {
            key.removeprefix(start): tensor for key, tensor in self.tensors.items() if key.startswith(start)
        }

    def metric_states(self, index: int) -> list[Tensors]:
        """The states of metric set `index`, as `MetricSet.states` gives them."""
        pieces: dict[int, Tensors] = {}
        for key, tensor in self.section(f"metrics/{index}").items():
            number, rest = key.split("/", 1)
            pieces.setdefault(int(number), {})[rest] = tensor
        return [pieces[number] for number in sorted(pieces)]


def gather_ranks(mine: RankState, collective: Collective) -> list[RankState]:
    """Every rank's state, in the order of ranks. Runs on every rank."""
    if collective.size == 1:
        return [mine]
    texts = _gather(json.dumps(mine.values).encode(), collective)
    files = _gather(save({key: tensor.contiguous() for key, tensor in mine.tensors.items()}), collective)
    return [
        RankState(tensors=load(file), values=json.loads(text))
        for text, file in zip(texts, files, strict=True)
    ]


def _gather(data: bytes, collective: Collective) -> list[bytes]:
    pieces = collective.all_gather(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return [piece.numpy().tobytes() for piece in pieces]


def restore_rank(
    parts: RankParts, states: Sequence[RankState], collective: Collective, seed: int, step: int
) -> None:
    """Puts this rank back where the ranks were at `step`, of which there were `len(states)`.

    Raises:
        ValueError: They are of another network or of other callbacks, or damaged.
    """
    if not states:
        raise ValueError("a checkpoint of no rank is damaged; take another checkpoint")
    try:
        if len(states) == collective.size:
            _restore_same(parts, states[collective.rank])
        else:
            _restore_other(parts, states, collective.rank)
            seed_anew(seed, step, collective.rank)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"what the checkpoint has of the ranks is of another training ({type(error).__name__}: {error}); "
            "take another checkpoint, or give runUri a folder of its own"
        ) from error


def _restore_same(parts: RankParts, own: RankState) -> None:
    _fill_buffers(parts.module, own.section("buffers"))
    parts.totals.load(own.tensors["totals"])
    for index, metric_set in enumerate(parts.metrics):
        metric_set.load_states(own.metric_states(index))
    parts.callbacks.load_state_dicts(own.values["callbacks"])
    parts.state.stop_reason = own.values["stop_reason"]
    # Last: whoever draws numbers while the rest is restored draws none of the training's.
    set_random_state(own.section("random"), own.values["random"], parts.device)


def _restore_other(parts: RankParts, states: Sequence[RankState], rank: int) -> None:
    _fill_buffers(parts.module, states[0].section("buffers"))
    total = torch.stack([state.tensors["totals"] for state in states]).sum(0)
    # The sums of the epoch so far belong to no rank any more: the first one answers for them.
    parts.totals.load(total if rank == 0 else torch.zeros_like(total))
    for index, metric_set in enumerate(parts.metrics):
        former = [own for state in states for own in state.metric_states(index)]
        metric_set.load_states(former if rank == 0 else [], carried=True)
    parts.callbacks.load_state_dicts(states[0].values["callbacks"])
    reasons = [state.values["stop_reason"] for state in states]
    parts.state.stop_reason = next((reason for reason in reasons if reason), None)


def _fill_buffers(module: nn.Module, values: Tensors) -> None:
    """Copies the values in; a buffer that a first pass makes is not there yet, and is made again."""
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in values:
                if values[name].shape != buffer.shape:
                    raise ValueError(
                        f"the checkpoint's buffer {name!r} has shape {tuple(values[name].shape)}, the "
                        f"model's {tuple(buffer.shape)}; give the model that was trained"
                    )
                buffer.copy_(values[name])
