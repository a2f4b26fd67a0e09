"""Pipeline parallelism: each rank has some of the layers, and micro-batches pass through the ranks."""
