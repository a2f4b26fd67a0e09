"""Reusing shards: the cache of those written, and what decides that two plans give the same rows."""
