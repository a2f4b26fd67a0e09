"""Gradient compression: the options of each compressor of `collectives.compressors`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt, Le

from ringspark.estimators.lazy_imports import load_object
from ringspark.estimators.options.checked import AtLeast1, NotNegative
from ringspark.estimators.options.declare import Options


@dataclass(frozen=True, kw_only=True)
class Compression(Options):
    """Options that all compressors have.

    Attributes:
        after: Optimizer steps before the first compressed step.
        least: Tensors with fewer elements are sent uncompressed, and so are tensors of one dimension.
        between: 'workers': every worker sends compressed gradients. 'hosts': the workers of a host first sum
            uncompressed gradients, and the sums are compressed between hosts.
        feedback: Whether the error of a step is added to the next step's gradient.
    """

    strategy: ClassVar[str] = "compressed"
    after: NotNegative = 0
    least: AtLeast1 = 1024
    between: Literal["workers", "hosts"] = "workers"
    feedback: bool = False

    @classmethod
    def variants(cls) -> dict[str, type[Options]]:
        with suppress(ModuleNotFoundError):  # without extras, their variants are unknown
            load_object("ringspark.extras.privacy.cpsgd_options:CpSGD")
        return super().variants()


@dataclass(frozen=True, kw_only=True)
class Uncompressed(Compression):
    """Uncompressed gradients; with between='hosts' they are summed per host first."""

    NAME: ClassVar[str] = "none"


@dataclass(frozen=True, kw_only=True)
class FP16(Compression):
    """Gradients in fp16, with a scale factor per slice of the gradient against underflow and overflow."""


@dataclass(frozen=True, kw_only=True)
class BF16(Compression):
    """Gradients in bf16."""


@dataclass(frozen=True, kw_only=True)
class TopK(Compression):
    """The elements of largest magnitude.

    Attributes:
        ratio: Share of the elements that are sent.
    """

    feedback: bool = True
    ratio: Annotated[float, Gt(0), Le(1)] = 0.01


@dataclass(frozen=True, kw_only=True)
class RandomK(Compression):
    """Random elements, the same on every worker.

    Attributes:
        ratio: Share of the elements that are sent.
    """

    feedback: bool = True
    ratio: Annotated[float, Gt(0), Le(1)] = 0.01


@dataclass(frozen=True, kw_only=True)
class Sparsify(Compression):
    """Random elements, each with a probability that grows with its magnitude.

    Attributes:
        ratio: Share of the elements that are sent, on average.
    """

    ratio: Annotated[float, Gt(0), Le(1)] = 0.1


@dataclass(frozen=True, kw_only=True)
class QSGD(Compression):
    """Random rounding to a few levels.

    Attributes:
        bits: Bits per element.
    """

    bits: Literal[2, 4, 8] = 4


@dataclass(frozen=True, kw_only=True)
class Sign(Compression):
    """One bit per element, and one scale per tensor."""

    feedback: bool = True


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Compression):
    """Matrices of low rank.

    Attributes:
        rank: Rank of the matrices.
    """

    feedback: bool = True
    rank: AtLeast1 = 2


@dataclass(frozen=True, kw_only=True)
class SufficientFactors(Compression):
    """Two thin matrices per gradient of a wide layer; exact if a worker's batch has at most `rows` rows.

    Attributes:
        rows: Largest rank of a worker's gradient: its rows per step, times their tokens in a language model.
    """

    feedback: bool = True
    rows: AtLeast1 = 32


@dataclass(frozen=True, kw_only=True)
class GradiVeQ(Compression):
    """Principal components of slices of the gradient.

    Attributes:
        slice: Elements per slice.
        components: Numbers that are sent per slice.
        samples: Uncompressed steps from which the components are computed.
        refresh: Compressed steps before the components are computed again.
    """

    feedback: bool = True
    slice: AtLeast1 = 256
    components: AtLeast1 = 16
    samples: AtLeast1 = 5
    refresh: AtLeast1 = 200
