"""Describes networks of the transformers library, and prepares them for the axes of a mesh.

`ringspark.models.adapters` has the import path. Blocks are found by their class, so a network needs no
method `links()`.
"""

from ringspark.extras.hugging_face.description import build, build_from_config, describe, stop_caching
from ringspark.extras.hugging_face.experts import find_experts, prepare_experts
from ringspark.extras.hugging_face.links import links
from ringspark.extras.hugging_face.sequence import prepare_sequence
from ringspark.extras.hugging_face.short import shorten

__all__ = [
    "build",
    "build_from_config",
    "describe",
    "find_experts",
    "links",
    "prepare_experts",
    "prepare_sequence",
    "shorten",
    "stop_caching",
]
