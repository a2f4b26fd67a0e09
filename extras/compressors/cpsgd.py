"""cpSGD: random rounding to integers, with secret binomial noise (Agarwal et al. 2018).

Each worker scales its gradient down to norm C / N, rotates it, rounds each element at random to one of a few
levels, and adds binomial noise. The workers sum the integers exactly, so the total has the noise of all
workers and no error of its own. `ringspark.extras.privacy.binomial` computes the privacy loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ringspark.estimators.collectives.base import Collective
from ringspark.estimators.options.compression import Compression
from ringspark.estimators.parallel.base import GradientSync, MakeOptimizer, SyncSettings
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.extras.compressors.base import Compressor, Sent, generator_for
from ringspark.extras.compressors.compressed_all_reduce import CompressedAllReduce
from ringspark.extras.compressors.packing import pack_integers, unpack_integers
from ringspark.extras.privacy.binomial import find_range
from ringspark.extras.privacy.secret_noise import secret_generator

_Integers = npt.NDArray[np.int64]


def rotate(vector: torch.Tensor, signs: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """Multiplies by random signs and takes the Hartley transform, which is orthogonal and its own inverse."""
    wave = torch.fft.fft(vector if back else vector * signs)
    turned: torch.Tensor = (wave.real - wave.imag) / math.sqrt(len(vector))
    return turned * signs if back else turned


class CpSgdCompressor(Compressor):
    """Sends integers with secret noise; unbiased for gradients up to the largest norm.

    Attributes:
        loss_scale: Factor of the vectors, which the largest norm is multiplied by.
    """

    def __init__(self, shapes: Sequence[torch.Size], seed: int, options: Compression) -> None:
        super().__init__(shapes, seed, options)
        self.loss_scale = 1.0
        self._secret = secret_generator()

    @classmethod
    def helps(cls, shape: torch.Size, options: Compression) -> bool:
        """Returns True: the account covers no gradient that is sent without noise."""
        return True

    def sum(self, vector: torch.Tensor, collective: Collective, step: int) -> Sent:
        size, elements = collective.size, len(vector)
        # Equal on all ranks, and public.
        random = generator_for(torch.empty(0), self.seed, step)
        signs = torch.randint(0, 2, (elements,), generator=random).double().mul_(2).sub_(1)
        codes = self.sum_codes(self.encode(vector, size, signs), collective, vector.device)
        top, reach = self.options.levels - 1, self._range(elements, size)
        middle = size * (top + self.options.trials) / 2
        values = torch.from_numpy(codes - middle) * (2 * reach / top)
        total = rotate(values, signs, back=True) if self.options.rotate else values
        return Sent(total.to(vector), None)

    def _range(self, elements: int, size: int) -> float:
        limit = find_range(elements, rotate=self.options.rotate) * self.options.max_norm
        return float(limit * self.loss_scale / size)

    def encode(self, vector: torch.Tensor, size: int, signs: torch.Tensor) -> _Integers:
        """Returns integers from 0 to levels - 1 + trials, (elements,)."""
        top = self.options.levels - 1
        # The processor computes in fp64, because the noise is drawn there.
        values = vector.detach().to("cpu", torch.float64, copy=True)
        norm, longest = float(values.norm()), self.options.max_norm * self.loss_scale / size
        if norm > longest:
            values *= longest / norm
        if self.options.rotate:
            values = rotate(values, signs)
        reach = self._range(len(vector), size)
        scaled = (values.clamp_(-reach, reach) + reach) * (top / (2 * reach))
        chances = self._secret.random(len(vector))
        levels: _Integers = np.clip(np.floor(scaled.numpy() + chances), 0, top).astype(np.int64)
        levels += self._secret.binomial(self.options.trials, 0.5, len(vector))
        return levels

    def sum_codes(self, codes: _Integers, collective: Collective, device: torch.device) -> _Integers:
        """Sums the ranks' integers exactly. Runs on every rank, which sums one shard."""
        size, largest = collective.size, self.options.levels - 1 + self.options.trials
        length = -(-len(codes) // size)
        padded = np.pad(codes, (0, length * size - len(codes)))
        few, many = largest.bit_length(), (size * largest).bit_length()
        pieces = [pack_integers(part, few).to(device) for part in np.split(padded, size)]
        arrived = collective.all_to_all(pieces, [len(pieces[0])] * size)
        mine = sum(unpack_integers(piece, few, length) for piece in arrived)
        answer = pack_integers(np.asarray(mine), many).to(device)
        answers = collective.all_gather(answer, [len(answer)] * size)
        return np.concatenate([unpack_integers(each, many, length) for each in answers])[: len(codes)]


class NoisyAllReduce(CompressedAllReduce):
    """Sums gradients by cpSGD, also on a single rank. Raises ValueError for parameters of other types."""

    takes_sparse = False

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, mesh: RankMesh, settings: SyncSettings
    ) -> None:
        super().__init__(module, optimizer, mesh, settings)
        if self._small or len(self._groups) > 1:
            kinds = sorted({str(p.dtype) for p in module.parameters() if p.requires_grad})
            raise ValueError(
                "CpSGD bounds the norm of all gradients together, so all trained parameters must be fp32, or "
                f"all fp64, got {', '.join(kinds)}; convert the network"
            )

    @classmethod
    def prepare(
        cls, module: nn.Module, make_optimizer: MakeOptimizer, mesh: RankMesh, settings: SyncSettings
    ) -> GradientSync:
        for layer in module.modules():
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                layer.sparse = False  # sparse gradients are sent without noise
        return super().prepare(module, make_optimizer, mesh, settings)

    def _send(self, vector: torch.Tensor, compressor: Compressor) -> Sent:
        assert isinstance(compressor, CpSgdCompressor)
        compressor.loss_scale = self._scale
        return compressor.sum(vector, self._collective, self._step)
