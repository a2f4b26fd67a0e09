"""Reuses shards: a cache of written shards, and the rules by which two plans give the same rows."""
