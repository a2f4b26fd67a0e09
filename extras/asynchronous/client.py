"""A worker's connections to all parameter servers; pushes and pulls name a parameter by its index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ringspark.estimators.parallel.sharded.parameter_shards import flatten_memory
from ringspark.estimators.parallel.sharded.shard_layout import ParameterSlice
from ringspark.extras.asynchronous.links import ServerLink

_NOT_SENT = ("params", "initial_lr", "foreach", "fused", "capturable", "differentiable")


class ParameterClient:
    """One worker's connections to all servers, in the order of the servers' ranks.

    Attributes:
        clock: Number of steps that this worker has finished.
        progress: Function called as other workers take steps while this worker waits.
    """

    def __init__(
        self,
        links: Sequence[ServerLink],
        pieces: Sequence[Mapping[int, ParameterSlice]],
        parameters: Sequence[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        bound: int | None,
    ) -> None:
        """Stores its arguments.

        Args:
            pieces: For each server, the slices that it holds, by the parameter's index.
            optimizer: Holds the group settings, such as the learning rate, that each push sends.
            bound: See `Asynchronous.bound`.
        """
        self.clock = 0
        self.progress: Callable[[], None] = lambda: None
        self.bytes_sent = 0
        self._links = links
        self._pieces = pieces
        self._parameters = parameters
        self._optimizer = optimizer
        self._bound = bound

    def push_and_wait(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Sends gradients in the current step; returns when all servers have them."""
        self._send(gradients, ends_step=False)
        # A server answers on the same connection, after it has taken the push.
        self._read(None, takes_values=False)

    def push_step(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Sends all gradients of a step and ends the step."""
        self._send(gradients, ends_step=True)
        self.clock += 1

    def pull_all(self, bound: int | None) -> None:
        """Waits until the staleness `bound` allows the read; copies the servers' values to all parameters.

        The values include this worker's own pushes.
        """
        self._read(bound, takes_values=True)

    def await_all(self) -> None:
        self._read(0, takes_values=False)

    def read_all(self) -> None:
        self.pull_all(self._bound)

    def close(self) -> None:
        for link in self._links:
            link.close()

    @torch.no_grad()
    def _send(self, gradients: Mapping[int, torch.Tensor], *, ends_step: bool) -> None:
        whole = dict(gradients)
        for index, gradient in gradients.items():
            parameter = self._parameters[index]
            if gradient.stride() != parameter.stride() or gradient.dtype != parameter.dtype:
                whole[index] = torch.empty_like(parameter).copy_(gradient)
        groups = [group_settings(group) for group in self._optimizer.param_groups]
        for link, pieces in zip(self._links, self._pieces, strict=True):
            own = {
                index: flatten_memory(whole[index])[piece.start : piece.stop].cpu()
                for index, piece in pieces.items()
                if index in whole
            }
            if own or ends_step:
                self.bytes_sent += link.push(own, groups, ends_step=ends_step)

    @torch.no_grad()
    def _read(self, bound: int | None, *, takes_values: bool) -> None:
        for link in self._links:
            link.ask(None if takes_values else [], self.clock, bound)
        for link, pieces in zip(self._links, self._pieces, strict=True):
            taken = pieces if takes_values else {}
            for (index, piece), values in zip(taken.items(), link.answer(self.progress), strict=True):
                whole = self._parameters[index]
                flatten_memory(whole.data)[piece.start : piece.stop] = values.to(whole.device)


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {"lr": float(group["lr"])}
    for key, value in group.items():
        is_plain = isinstance(value, bool | int | float | str) or value is None
        is_plain = is_plain or (isinstance(value, tuple) and all(isinstance(v, int | float) for v in value))
        if is_plain and key not in _NOT_SENT and key != "lr":
            plain[key] = value
    return plain
