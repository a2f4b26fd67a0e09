"""Checks of a training on the driver, before a gang starts."""
