"""Reuses shards: a cache of written shards, and rules that decide whether two plans give the same rows."""
