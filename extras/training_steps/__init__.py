"""Custom training steps: several losses, several optimizers, losses over the rows of all ranks.

The function in the setting `trainingStep` gets a `step.Step`. `losses` has losses over pairs of rows.
"""

from ringspark.extras.training_steps.step import Step

__all__ = ["Step"]
