"""Offsets: a known number per row that a network adds to its output, such as the logarithm of an exposure."""
