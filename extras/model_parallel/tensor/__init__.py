"""Tensor parallelism: each rank has a shard of every large matrix, and computes with all rows."""
