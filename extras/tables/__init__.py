"""Trains on a plain table: plans its columns, and builds a network for them."""
