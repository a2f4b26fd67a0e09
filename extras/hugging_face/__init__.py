"""Prepares networks of the transformers library for the axes of a mesh.

`ringspark.models.adapters` has the import path. Blocks are found by their class, so a network needs no
method `links()`.
"""

from ringspark.extras.hugging_face.links import links

__all__ = ["links"]
