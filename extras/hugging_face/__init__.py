"""Describes networks of the transformers library, and prepares them for the axes of a mesh.

`ringspark.models.adapters` has the import path. Blocks are found by their class, so a network needs no
method `links()`.
"""

from ringspark.extras.hugging_face.description import build as build
from ringspark.extras.hugging_face.description import build_from_config as build_from_config
from ringspark.extras.hugging_face.description import describe as describe
from ringspark.extras.hugging_face.description import stop_caching as stop_caching
from ringspark.extras.hugging_face.experts import find_experts as find_experts
from ringspark.extras.hugging_face.experts import prepare_experts as prepare_experts
from ringspark.extras.hugging_face.links import links as links
from ringspark.extras.hugging_face.sequence import prepare_sequence as prepare_sequence
from ringspark.extras.hugging_face.short import shorten as shorten
