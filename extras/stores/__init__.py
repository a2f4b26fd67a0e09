"""Stores that need more than their client in fsspec."""
