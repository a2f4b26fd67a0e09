"""TensorFlow's MultiWorkerMirroredStrategy, with a training loop of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf


def main() -> None:
    # Reads TF_CONFIG, and waits for the other workers.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    rank = resolver.task_id
    with strategy.scope():
        weights = tf.Variable(tf.zeros([4, 1]), aggregation=tf.VariableAggregation.MEAN)

    def step(inputs: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((inputs @ weights - tf.reduce_sum(inputs, 1, keepdims=True)) ** 2)
        gradient = tape.gradient(loss, weights)
        total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradient)
        weights.assign_sub(0.1 * total)
        return loss

    @tf.function
    def run(inputs: tf.Tensor) -> tf.Tensor:
        return strategy.reduce(tf.distribute.ReduceOp.MEAN, strategy.run(step, (inputs,)), axis=None)

    generator, losses = np.random.default_rng(rank), []
    for _ in range(20):
        losses.append(float(run(tf.constant(generator.normal(size=(32, 4)).astype(np.float32)))))
    report = {"rank": rank, "size": strategy.num_replicas_in_sync, "losses": losses}
    report["weights"] = weights.numpy().ravel().tolist()
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
