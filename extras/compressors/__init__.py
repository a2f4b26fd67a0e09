"""Gradient compression: one file per compressor, one registry."""

from __future__ import annotations

from ringspark.estimators.lazy_imports import LazyRegistry
from ringspark.extras.compressors.base import Compressor, Sent

# By the `NAME` of its options in `options.compression`.
COMPRESSORS: LazyRegistry[type[Compressor]] = LazyRegistry(
    {
        "none": "ringspark.extras.compressors.uncompressed:UncompressedSum",
        "fp16": "ringspark.extras.compressors.sixteen_bits:Fp16Compressor",
        "bf16": "ringspark.extras.compressors.sixteen_bits:Bf16Compressor",
        "topk": "ringspark.extras.compressors.topk:TopKCompressor",
        "randomk": "ringspark.extras.compressors.randomk:RandomKCompressor",
        "sparsify": "ringspark.extras.compressors.sparsify:SparsifyCompressor",
        "qsgd": "ringspark.extras.compressors.qsgd:QsgdCompressor",
        "sign": "ringspark.extras.compressors.sign:SignCompressor",
        "sufficientfactors": "ringspark.extras.compressors.sufficient:SufficientFactorCompressor",
        "powersgd": "ringspark.extras.compressors.powersgd:PowerSgdCompressor",
        "gradiveq": "ringspark.extras.compressors.gradiveq:GradiVeQCompressor",
        "cpsgd": "ringspark.extras.compressors.cpsgd:CpSgdCompressor",
    }
)


__all__ = ["COMPRESSORS", "Compressor", "Sent"]
