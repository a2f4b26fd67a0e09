"""Checks of a user's own optimizers and hooks, which the driver runs before a training."""
