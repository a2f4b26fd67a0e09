"""Optimizers for large batches and little memory; docs/design.md says why they are our own."""
