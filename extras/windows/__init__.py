"""Rows of one key, in the order of their time, as sequences for a network."""
