"""Training steps of a user's own: several losses, several optimizers, losses over all ranks' rows.

`step.Step` is what the setting `trainingStep` gets; `losses` has losses over pairs of rows.
"""

from ringspark.extras.training_steps.step import Step

__all__ = ["Step"]
