"""Refusals of the setting `parallelism`; tests/pairs has those of other settings' values."""

from torch import nn

from bad_input_table.place import DEEP, BadInput
from ringspark.models import CountingLayer, ModelSpec

R = BadInput

# fmt: off
MESHES = [
    R("mesh: no dict", lambda p: p.fit(parallelism="tensor"),
      "parallelism must be a Mesh or 'auto'", "got 'tensor'", TypeError),
    R("mesh: unknown axis", lambda p: p.fit(parallelism={"tensors": 2}),
      "Mesh has no option 'tensors'", "did you mean 'tensor'"),
    R("mesh: no workers", lambda p: p.fit(parallelism={"tensor": 0}),
      "Mesh's tensor must be at least 1, got 0", ""),
    R("mesh: half a worker", lambda p: p.fit(parallelism={"tensor": 1.5}),
      "Mesh's tensor must be a whole number", "got 1.5"),
    R("mesh: not the workers", lambda p: p.fit(parallelism={"tensor": 4}, numWorkers=2),
      r"must multiply to numWorkers \(2\), got tensor 4 = 4", "set numWorkers"),
    R("mesh: more than the workers", lambda p: p.fit(parallelism={"data": 2, "tensor": 2}, numWorkers=2),
      r"got data 2 x tensor 2 = 4", "set numWorkers"),
    R("mesh: a plan that is none", lambda p: p.mesh(parallelism={"tensor": 2, "plan": "columns"}),
      "Mesh's plan must be a dict", "got 'columns'"),
    R("mesh: a style that is none", lambda p: p.mesh(parallelism={"tensor": 2, "plan": {"head": "kolumn"}}),
      "style must be one of column, .* got 'kolumn'", "did you mean 'column'"),
    R("mesh: a plan for other layers", lambda p: p.mesh(parallelism={"tensor": 2, "plan": {"tail": "row"}}),
      "plan names 'tail', which fits no layer", "leave it out, or name some of trunk.0.linear, head"),
    R("mesh: a plan of half a pair",
      lambda p: p.mesh(parallelism={"tensor": 2, "plan": {"trunk.0.linear": "column"}}),
      "MLP does not run under parallelism", "name both layers of each pair"),
    R("mesh: a plan that cuts the outputs",
      lambda p: p.mesh(model=ModelSpec("mlp", {"in_features": 2, "hidden": [2], "out_features": 2}),
                       parallelism={"tensor": 2, "plan": {"head": "column"}}),
      r"in evaluation mode output 0 has shape \(2, 1\), but \(2, 2\) in the whole network",
      "use 'column_joined'"),
    R("mesh: no cuts", lambda p: p.fit(parallelism={"pipeline": {"stages": 2, "cuts": None}}),
      "Pipeline's cuts must be a name or a list of names", "got None"),
    R("mesh: a micro-batch without a row for each copy",
      lambda p: p.fit(numWorkers=4, gradientAccumulation=5, parallelism={"data": 2, "pipeline": 2}),
      r"gradientAccumulation \(5\) times the workers that read different rows \(2 of numWorkers 4\)",
      "lower gradientAccumulation or"),
    R("mesh: a plan that cuts no matrix",
      lambda p: p.mesh(parallelism={"tensor": 2, "plan": {"trunk.0.norm": "row"}}),
      "plan cannot shard 'trunk.0.norm': .* nn.Linear, got Identity", ""),
    R("mesh: more parts than columns", lambda p: p.mesh(parallelism={"tensor": 4}, numWorkers=4),
      "'tensor' has 4 workers, but 'trunk.0.linear' is too small", "set a smaller 'tensor'"),
    R("mesh: sequence_parallel that is a text",
      lambda p: p.mesh(parallelism={"tensor": 2, "sequence_parallel": "part"}),
      "sequence_parallel must be", "got 'part'"),
    R("mesh: heads that do not divide",
      lambda p: p.mesh(model=three_heads(), parallelism={"tensor": 2}),
      r"'tensor' must divide num_heads \(3\), got 2", "set num_heads to a multiple"),
    R("mesh: layers that count parts of rows",
      lambda p: p.mesh(model=counting(), parallelism={"sequence": 2}),
      r"shards rows, but layer 'norm\.1' counts over whole rows", "set 'sequence' to 1"),
    R("mesh: no sequence chunk",
      lambda p: p.mesh(parallelism={"pipeline": {"stages": 2, "sequence_chunks": 0}}),
      "Pipeline's sequence_chunks must be at least 1", "got 0"),
    R("mesh: sequence chunks without stages",
      lambda p: p.mesh(parallelism={"data": 2, "pipeline": {"stages": 1, "sequence_chunks": 4}}),
      r"sequence_chunks \(4\) passes chunks of rows", "set stages"),
    R("mesh: sequence chunks with sequence-sharded rows",
      lambda p: p.mesh(numWorkers=4,
                       parallelism={"pipeline": {"stages": 2, "sequence_chunks": 4}, "sequence": 2}),
      "sequence_chunks works only with the axes 'data', 'shard' and 'pipeline'", "leave the other axes"),
    R("mesh: sequence chunks with backward passes in halves",
      lambda p: p.mesh(parallelism={"pipeline": {"stages": 2, "schedule": "zero_bubble",
                                                 "sequence_chunks": 4}}),
      "sequence_chunks needs whole .* schedule 'zero_bubble' splits", "set schedule='1f1b'"),
    R("mesh: with the noise scale", lambda p: p.mesh(parallelism={"tensor": 2}, noiseScale=True),
      "noiseScale needs the whole network", "leave noiseScale unset"),
    R("mesh: planned, and none fits",
      lambda p: p.train(model=DEEP, numWorkers=2, parallelism="auto", memoryBudget=10),
      "'auto' found no mesh: no mesh of 2 workers fits", "give more workers or memory"),
]
# fmt: on


def three_heads() -> ModelSpec:
    sizes = {"vocab_size": 9, "max_seq_len": 2, "dim": 6, "depth": 1, "num_heads": 3, "out_features": 2}
    return ModelSpec("transformer_classifier", sizes)


class Counting(CountingLayer):
    """Counts its inputs; cannot count shards of rows."""

    num_counts = 1


def counting() -> nn.Module:
    network = three_heads().build()
    network.norm = nn.Sequential(network.norm, Counting())
    return network
