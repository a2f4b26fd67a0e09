"""Trackers that need another package: MLflow and TensorBoard."""
