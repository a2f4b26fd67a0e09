"""Reuses shards: a cache of written shards, found by the user's key."""
