"""Losses that take the network, and may differentiate through it again."""
