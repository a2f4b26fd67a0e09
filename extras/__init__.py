"""Techniques that few trainings use; the registries of the core name them by their import paths."""
