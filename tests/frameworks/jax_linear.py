"""A JAX script: gradient descent with an all-reduce over the devices of all processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def main() -> None:
    jax.distributed.initialize(
        num_processes=int(os.environ["WORLD_SIZE"]), process_id=int(os.environ["RANK"])
    )
    mesh = jax.make_mesh((jax.device_count(),), ("rows",))
    rows, everywhere = NamedSharding(mesh, PartitionSpec("rows")), NamedSharding(mesh, PartitionSpec())
    # Each process has its own rows of the global arrays.
    inputs = np.random.default_rng(jax.process_index()).normal(size=(64, 4)).astype(np.float32)
    x = jax.make_array_from_process_local_data(rows, inputs)
    y = jax.make_array_from_process_local_data(rows, inputs.sum(1))

    def loss_of(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((x @ w - y) ** 2)

    # The mean is over the rows of all processes, so its gradient is an all-reduce.
    step = jax.jit(jax.value_and_grad(loss_of), out_shardings=everywhere)
    w, losses = jax.device_put(jnp.zeros(4), everywhere), []
    for _ in range(20):
        loss, gradient = step(w, x, y)
        w = w - 0.1 * gradient
        losses.append(float(loss))
    weights = np.asarray(w.addressable_data(0)).tolist()
    place = {"rank": jax.process_index(), "size": jax.process_count()}
    report = {**place, "losses": losses, "weights": weights}
    Path(sys.argv[1], f"{jax.process_index()}.json").write_text(json.dumps(report))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
