# Databricks notebook source
# MAGIC %md
# MAGIC # What a training computes, and what it costs
# MAGIC
# MAGIC Linear regression in three ways, derivatives in two directions, a convolution as a matrix product,
# MAGIC and an all-reduce. Each has its *work* (the number of operations: the time on one processor) and its
# MAGIC *depth* (the longest chain of dependent operations: the time on unlimited processors).
# MAGIC
# MAGIC Needs `ringspark` on the cluster (`%pip install ringspark`).

# COMMAND ----------

import math
import os
import tempfile
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from pyspark.sql import functions as F
from torch import nn

from ringspark.estimators import TorchRegressor

# A folder that the driver and all workers reach.
FOLDER = (
    "/dbfs/tmp/ringspark-learning" if os.path.isdir("/dbfs/tmp") else tempfile.mkdtemp(prefix="learning-")
)
ROWS, STEPS, RATE = 2048, 30, 0.3

# COMMAND ----------

# MAGIC %md
# MAGIC ## Work and depth
# MAGIC Sequential parts add up in work and in depth. Parallel parts add up in work only. A sum of n numbers
# MAGIC as a tree has n - 1 additions in log2(n) layers. Everything else follows from these three lines.

# COMMAND ----------


@dataclass(frozen=True)
class Cost:
    work: int
    depth: int

    def then(self, later):
        return Cost(self.work + later.work, self.depth + later.depth)

    def beside(self, copies):
        return Cost(self.work * copies, self.depth)

    def times(self, repeats):
        return Cost(self.work * repeats, self.depth * repeats)


ONE = Cost(1, 1)


def tree_sum(n):
    return Cost(n - 1, math.ceil(math.log2(n)))


def dot(n):
    return ONE.beside(n).then(tree_sum(n))


def matrix_product(rows, inner, columns):
    return dot(inner).beside(rows * columns)


def show(costs):
    table = [(name, cost.work, cost.depth) for name, cost in costs.items()]
    spark.createDataFrame(table, "computation string, work long, depth long").show(truncate=False)


show({f"dot product of {n} numbers": dot(n) for n in (8, 64, 512, 4096)})

# COMMAND ----------

# MAGIC %md
# MAGIC ## Linear regression: the closed form
# MAGIC The weights solve `(X'X) w = X'y`. Spark needs one pass over the rows, because every entry of `X'X`
# MAGIC and `X'y` is a sum over rows. The driver solves the system, with one equation per column.

# COMMAND ----------

TRUE = [2.0, -1.0, 0.5, 3.0]  # of three columns, and the constant
columns = [F.randn(seed).alias(f"x{seed}") for seed in range(3)]
table = spark.range(0, ROWS, 1, 2).select(*columns, (0.1 * F.randn(3)).alias("noise"))
exact = sum((weight * F.col(f"x{i}") for i, weight in enumerate(TRUE[:3])), F.lit(TRUE[3]))
table = table.select(F.array("x0", "x1", "x2").alias("features"), (exact + F.col("noise")).alias("label"))
table = table.cache()

terms = [F.col("features")[i] for i in range(3)] + [F.lit(1.0), F.col("label")]
pairs = [(i, j) for i in range(5) for j in range(i, 5)]
sums = table.agg(*[F.sum(terms[i] * terms[j]) for i, j in pairs]).first()
moments = np.zeros((5, 5))
for (i, j), value in zip(pairs, sums, strict=True):
    moments[i, j] = moments[j, i] = value
closed = np.linalg.solve(moments[:4, :4], moments[:4, 4])
closed

# COMMAND ----------

# MAGIC %md
# MAGIC ## Gradient descent by hand
# MAGIC Each partition sums the gradients of its rows. The driver adds these sums and takes a step. A gang
# MAGIC of ranks does the same, but its ranks stay alive between the steps and all-reduce their gradients.

# COMMAND ----------


def partial_gradients(weights):
    """A function from the rows of a partition to the sum of their gradients, one row."""

    def of_partition(batches):
        total = np.zeros(4)
        for batch in batches:
            inputs = np.stack(batch.column("features").to_numpy(zero_copy_only=False))
            inputs = np.column_stack([inputs, np.ones(len(inputs))])
            total += 2 * inputs.T @ (inputs @ weights - batch.column("label").to_numpy())
        yield pa.record_batch({"gradient": pa.array([total.tolist()])})

    return of_partition


by_hand = np.zeros(4)
for _ in range(STEPS):
    parts = table.mapInArrow(partial_gradients(by_hand), "gradient array<double>").collect()
    by_hand = by_hand - RATE * np.sum([part.gradient for part in parts], axis=0) / ROWS
by_hand

# COMMAND ----------

# MAGIC %md
# MAGIC ## `fit`
# MAGIC The same descent: all rows in each step, plain SGD, the mean squared error.

# COMMAND ----------

model = TorchRegressor(
    model=nn.Linear(3, 1),
    optimizer="sgd",
    learningRate=RATE,
    epochs=STEPS,
    batchSize=ROWS,
    numWorkers=2,
    storageUri=f"{FOLDER}/storage",
).fit(table)
layer = model.module()
fitted = np.append(layer.weight.detach().numpy().ravel(), layer.bias.detach().numpy())

# COMMAND ----------

ways = {"closed form": closed, "by hand": by_hand, "fit": fitted}
differences = {name: float(np.abs(weights - closed).max()) for name, weights in ways.items()}
for name, weights in ways.items():
    print(f"{name:12}", np.round(weights, 5), f"largest difference {differences[name]:.1e}")

# COMMAND ----------

# MAGIC %md
# MAGIC The closed form is one pass over the rows, with a small depth. Each step of gradient descent depends
# MAGIC on the step before, so each adds the depth of a sum over all rows. Descent pays off if there is no
# MAGIC closed form, or if there are many columns: the work of the closed form grows with their square, and
# MAGIC the work of the elimination with their cube.

# COMMAND ----------


def normal_equations(rows, columns):
    sums = matrix_product(columns, rows, columns + 1)
    solve = Cost(0, 0)
    for left in range(columns, 0, -1):  # divides a pivot's row, and subtracts it from all other rows
        solve = solve.then(ONE.beside(left)).then(ONE.then(ONE).beside(left * (columns - 1)))
    return sums.then(solve)


def descent(rows, columns, steps):
    residuals = dot(columns).then(ONE).beside(rows)
    return residuals.then(dot(rows).beside(columns)).then(ONE.then(ONE).beside(columns)).times(steps)


show(
    {
        f"{name}, {columns} columns": cost
        for columns in (4, 64, 1024)
        for name, cost in (
            ("closed form", normal_equations(ROWS, columns)),
            (f"{STEPS} steps", descent(ROWS, columns, STEPS)),
        )
    }
)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Derivatives forward
# MAGIC A dual number holds a value and its derivative along one direction. Every operation computes both.

# COMMAND ----------


@dataclass(frozen=True)
class Dual:
    value: float
    slope: float

    def __add__(self, other):
        return Dual(self.value + other.value, self.slope + other.slope)

    def __mul__(self, other):
        return Dual(self.value * other.value, self.slope * other.value + self.value * other.slope)

    def sin(self):
        return Dual(math.sin(self.value), math.cos(self.value) * self.slope)


def curve(x, y):
    return (x * y).sin() + x * x


point, direction = (0.7, -1.3), (1.0, 2.0)
dual = curve(*(Dual(value, slope) for value, slope in zip(point, direction, strict=True))).slope
tensors = tuple(torch.tensor(value, dtype=torch.float64) for value in point)
slopes = tuple(torch.tensor(slope, dtype=torch.float64) for slope in direction)
jvp = torch.func.jvp(curve, tensors, slopes)[1].item()
leaves = [tensor.clone().requires_grad_() for tensor in tensors]
gradients = torch.autograd.grad(curve(*leaves), leaves)
reverse = sum(gradient.item() * slope for gradient, slope in zip(gradients, direction, strict=True))
print(f"dual numbers {dual:.12f}, torch.func.jvp {jvp:.12f}, autograd {reverse:.12f}")

# COMMAND ----------

# MAGIC %md
# MAGIC ## And in reverse
# MAGIC For f: R^n -> R^m, forward mode computes a column of the Jacobian and reverse mode computes a row. A
# MAGIC loss is one number that depends on many weights (m = 1), so training uses `backward`. Reverse mode
# MAGIC keeps the values of the forward pass. Gradient checkpointing saves this memory.

# COMMAND ----------


def forward_jacobian(f, x):
    """The Jacobian by columns, and the number of passes."""
    columns = [torch.func.jvp(f, (x,), (unit,))[1] for unit in torch.eye(len(x), dtype=x.dtype)]
    return torch.stack(columns, 1), len(columns)


def reverse_jacobian(f, x):
    """The Jacobian by rows, and the number of passes back."""
    leaf = x.clone().requires_grad_()
    outputs = f(leaf)
    rows = [torch.autograd.grad(output, leaf, retain_graph=True)[0] for output in outputs]
    return torch.stack(rows), len(rows)


passes, jacobian_difference = [], 0.0
for n, m in ((64, 1), (16, 16), (1, 64)):
    generator = torch.Generator().manual_seed(n)
    matrix = torch.randn(m, n, generator=generator, dtype=torch.float64)
    x = torch.randn(n, generator=generator, dtype=torch.float64)
    by_columns, forward_passes = forward_jacobian(lambda x, matrix=matrix: torch.tanh(matrix @ x), x)
    by_rows, reverse_passes = reverse_jacobian(lambda x, matrix=matrix: torch.tanh(matrix @ x), x)
    jacobian_difference = max(jacobian_difference, (by_columns - by_rows).abs().max().item())
    one = matrix_product(m, n, 1).then(ONE.beside(m))
    works = [one.times(1 + count).work for count in (forward_passes, reverse_passes)]
    passes.append((n, m, forward_passes, reverse_passes, *works))
names = "n int, m int, forward_passes int, reverse_passes int, forward_work long, reverse_work long"
spark.createDataFrame(passes, names).show()
print(f"largest difference of the Jacobians: {jacobian_difference:.1e}")

# COMMAND ----------

# MAGIC %md
# MAGIC ## One network, three graphs
# MAGIC `torch.fx` records the modules that `forward` calls, `torch.export` the operators below them with
# MAGIC their shapes, and autograd the backward functions of the call that was made.

# COMMAND ----------

network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
example = torch.randn(2, 3)


def backward_functions(node):
    parents = [parent for parent, _ in node.next_functions if parent is not None]
    return [type(node).__name__, *(name for parent in parents for name in backward_functions(parent))]


modules = [node.target for node in torch.fx.symbolic_trace(network).graph.nodes if node.op == "call_module"]
operators = [
    f"{node.target}: {tuple(node.meta['val'].shape)}"
    for node in torch.export.export(network, (example,)).graph.nodes
    if node.op == "call_function"
]
backward = backward_functions(network(example).grad_fn)
for name, nodes in {"torch.fx": modules, "torch.export": operators, "autograd": backward}.items():
    print(f"{name:<14}{', '.join(nodes)}")

# COMMAND ----------

# MAGIC %md
# MAGIC ## A convolution is a matrix product
# MAGIC *im2col* copies every patch of the image into a column, and multiplies by the kernels as rows.
# MAGIC Alternatively, the image is a plain vector, and the kernels become a Toeplitz matrix that is mostly
# MAGIC zeros.

# COMMAND ----------

IN, OUT, SIDE, KERNEL = 3, 4, 8, 3
PLACES = SIDE - KERNEL + 1  # along a side
generator = torch.Generator().manual_seed(0)
image = torch.randn(1, IN, SIDE, SIDE, generator=generator)
kernels = torch.randn(OUT, IN, KERNEL, KERNEL, generator=generator)
expected = nn.functional.conv2d(image, kernels)

patches = [
    image[0, :, row : row + KERNEL, column : column + KERNEL].flatten()
    for row in range(PLACES)
    for column in range(PLACES)
]
im2col = (kernels.flatten(1) @ torch.stack(patches, 1)).view(expected.shape)

toeplitz = torch.zeros(OUT, PLACES, PLACES, IN, SIDE, SIDE)
for row in range(PLACES):
    for column in range(PLACES):
        toeplitz[:, row, column, :, row : row + KERNEL, column : column + KERNEL] = kernels
toeplitz = toeplitz.view(OUT * PLACES**2, IN * SIDE**2)
as_vector = (toeplitz @ image.flatten()).view(expected.shape)

convolution_differences = {
    "im2col": (im2col - expected).abs().max().item(),
    "Toeplitz": (as_vector - expected).abs().max().item(),
}
zeros = (toeplitz == 0).double().mean().item()
print(convolution_differences, f"zeros in the Toeplitz matrix: {zeros:.0%}")
show(
    {
        "im2col": matrix_product(OUT, IN * KERNEL**2, PLACES**2),
        "Toeplitz, zeros included": matrix_product(*toeplitz.shape, 1),
    }
)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Ring all-reduce
# MAGIC A ring all-reduce splits the gradient into one chunk per rank. In each round every rank sends one
# MAGIC chunk to its neighbour: a reduce-scatter adds the chunks, then an all-gather distributes the sums.
# MAGIC This cell simulates it and counts. A rank sends less than two gradients for any number of ranks. The
# MAGIC number of rounds grows with the number of ranks; a tree needs only its logarithm.

# COMMAND ----------


def ring_all_reduce(gradients):
    """Every rank's copy of the sum; additions, rounds, and numbers that a rank sends."""
    ranks = len(gradients)
    pieces = [np.array_split(gradient.copy(), ranks) for gradient in gradients]
    additions = rounds = sent = 0
    for turn in range(2 * (ranks - 1)):
        # All send at the same time: what a rank gets in this round, it sends in a later one.
        messages = [pieces[rank][(rank - turn) % ranks].copy() for rank in range(ranks)]
        for rank, message in enumerate(messages):
            place = (rank - turn) % ranks
            neighbour = pieces[(rank + 1) % ranks]
            adding = turn < ranks - 1
            neighbour[place] = neighbour[place] + message if adding else message
            additions += message.size * adding
        rounds += 1
        sent += messages[0].size
    return [np.concatenate(parts) for parts in pieces], additions, rounds, sent


rings, ring_difference = [], 0.0
for ranks in (2, 4, 8, 16):
    gradients = np.random.default_rng(ranks).normal(size=(ranks, 1024))
    totals, additions, rounds, sent = ring_all_reduce(list(gradients))
    difference = max(np.abs(total - gradients.sum(0)).max() for total in totals)
    ring_difference = max(ring_difference, float(difference))
    rings.append((ranks, additions, rounds, 2 * tree_sum(ranks).depth, sent))
names = "ranks int, work long, depth_of_ring int, depth_of_tree int, numbers_sent_by_a_rank int"
spark.createDataFrame(rings, names).show()
print(f"largest difference from the plain sum: {ring_difference:.1e}")
