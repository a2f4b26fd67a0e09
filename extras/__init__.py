"""Techniques that few trainings use.

The core's registries hold their import paths, and import a technique when a training first uses it.
"""
