"""Trainings without a label: autoencoders, and masked pretraining of tables and texts."""
