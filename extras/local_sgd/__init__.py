"""Ranks that step on their own and meet every few steps: one way to meet a file."""
