"""Where saved networks find `Linear`."""

from ringspark.models.mlp import Linear as Linear
