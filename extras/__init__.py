"""Techniques that few trainings use.

The core's registries name them by import path, so they are imported on use.
"""
