"""Formats for serving: a model that predicts rows without ringspark, and files for other runtimes."""
