"""Checks of optimizers of a user's own class, which the driver runs before a training."""
