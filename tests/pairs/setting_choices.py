"""Values of every setting for the matrix of pairs, in groups; the first value of a group is its default."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from own_parts import Bag, classify, decay, halve, own_elementwise, own_whole, penalize_slopes

from ringspark.estimators import (
    AllReduce,
    DiLoCo,
    ElasticAveraging,
    Hogwild,
    LocalSGD,
    LoRA,
    Mesh,
    ParameterServer,
    Pipeline,
    Zero,
)
from ringspark.estimators.options import compression as codec
from ringspark.models import ModelSpec
from ringspark.pipelines import Image, Ragged, Sparse, Tokens

ROWS = 48
VOCABULARY = 20
LENGTH = 8
WORDS = [f"w{number}" for number in range(VOCABULARY)]

Promise = Literal["equal", "kept", "learns"]


@dataclass(frozen=True)
class Choice:
    """One value of a setting.

    Attributes:
        params: Params of the estimator, or a function that makes them for the network of the columns.
        promise: 'equal' if the weights equal the training without this value; 'kept' if the weights equal one
            worker's with this value; 'learns' if only the loss falls.
        extras: Whether `ringspark.extras` implements the value.
        workers: Workers along the mesh, for meshes.
    """

    name: str
    params: Mapping[str, Any] | Callable[[Network], dict[str, Any]] = field(default_factory=dict)
    promise: Promise = "kept"
    extras: bool = False
    workers: int = 2


@dataclass(frozen=True)
class Network:
    """Columns of the table and the network that reads them.

    Attributes:
        params: Params of columns and model.
        linear: Pattern of linear layers, for LoRA.
        frozen: Pattern of the parameters that are frozen.
        grouped: Pattern of parameters with their own learning rate; LoRA trains them too.
    """

    params: Callable[[], dict[str, Any]]
    linear: str
    frozen: str
    grouped: str


def transformer(**changes: Any) -> ModelSpec:
    sizes = {"vocab_size": VOCABULARY, "max_seq_len": LENGTH, "dim": 16, "depth": 2, "num_heads": 2}
    return ModelSpec("transformer_classifier", {**sizes, "mlp_dim": 32, "out_features": 2, **changes})


def perceptron(width: int) -> ModelSpec:
    return ModelSpec("mlp", {"in_features": width, "hidden": [16, 16, 16], "out_features": 2})


def recurrent() -> ModelSpec:
    return ModelSpec("recurrent", {"in_features": 2, "hidden": 8, "out_features": 2, "depth": 3})


def bag(num_ids: int, mode: str, is_sparse: bool = False) -> Bag:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Bag(num_ids, mode, is_sparse)


def tokens() -> Tokens:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    ids = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return Tokens.of(tokenizer, max_length=LENGTH)


def picture(number: int, is_bright: bool) -> bytes:
    from PIL import Image as Picture

    found = io.BytesIO()
    level = (140 if is_bright else 20) + 2 * number
    Picture.new("RGB", (8, 8), (level, 255 - level, 7 * number % 256)).save(found, "PNG")
    return found.getvalue()


def _read(column: str, model: Any, kind: Any = None) -> dict[str, Any]:
    return {"featuresCol": column, "model": model} | ({"columns": {column: kind}} if kind else {})


_MIXTURE = {"experts": {"num_experts": 2, "router": "switch"}}
NETWORKS: dict[str, Network] = {
    "numbers": Network(lambda: _read("numbers", perceptron(6)), "trunk.1.linear", "trunk.0.*", "head.*"),
    "ids": Network(lambda: _read("ids", transformer()), "blocks.*.up", "positions.*", "head.*"),
    "ids with experts": Network(
        lambda: _read("ids", transformer(**_MIXTURE)), "blocks.*.attention.out", "positions.*", "head.*"
    ),
    "ragged": Network(
        lambda: _read("ragged", bag(VOCABULARY, "mean"), Ragged()), "head.0", "table.*", "head.2.*"
    ),
    "sparse": Network(
        lambda: _read("sparse", bag(VOCABULARY, "sum"), Sparse()), "head.0", "table.*", "head.2.*"
    ),
    "sparse gradients": Network(
        lambda: _read("ragged", bag(VOCABULARY, "mean", True), Ragged()), "head.0", "table.*", "head.2.*"
    ),
    "text": Network(
        lambda: _read("text", transformer(vocab_size=VOCABULARY + 2), tokens()),
        "blocks.*.up",
        "positions.*",
        "head.*",
    ),
    "image": Network(
        lambda: _read(
            "image",
            ModelSpec(
                "resnet", {"in_channels": 3, "out_features": 2, "depths": [1, 1], "width": 4, "norm": "group"}
            ),
            Image(8, 8),
        ),
        "head",
        "stem.*",
        "head.bias",
    ),
    "series": Network(lambda: _read("series", recurrent()), "head", "layers.0.*", "head.bias"),
    "windows": Network(lambda: _read("features", recurrent()), "head", "layers.0.*", "head.bias"),
    "struct": Network(lambda: _read("struct", perceptron(3)), "trunk.1.linear", "trunk.0.*", "head.*"),
}


def _compressed(**kind: Any) -> dict[str, Any]:
    ((name, options),) = kind.items()
    return {"sync": AllReduce(compression=getattr(codec, name)(least=1, **options))}


def _codec(name: str, extras: bool = True, **options: Any) -> Choice:
    return Choice(name, _compressed(**{name: options}), "learns", extras=extras)


def _mesh(
    name: str, workers: int = 2, extras: bool = False, promise: Promise = "equal", **axes: Any
) -> Choice:
    return Choice(name, {"parallelism": Mesh(**axes)}, promise, extras, workers)


def _pipeline(schedule: str, promise: Promise = "equal", extras: bool = False, **options: Any) -> Choice:
    pipeline = Pipeline(2, schedule=schedule, **options)
    return _mesh(f"pipeline {schedule}", pipeline=pipeline, promise=promise, extras=extras)


NONE = Choice("none")
_PRIVACY = {"noiseMultiplier": 1.0, "delta": 1e-3, "maxGradNorm": 1.0}

GROUPS: dict[str, list[Choice]] = {
    "columns": [Choice(name, extras=name == "windows") for name in NETWORKS],
    "sync": [
        Choice("all-reduce", {"sync": AllReduce()}, "equal"),
        _codec("FP16", extras=False),
        _codec("BF16", extras=False),
        _codec("PowerSGD", extras=False, rank=2),
        _codec("TopK", extras=False, ratio=0.3),
        _codec("RandomK", ratio=0.3),
        _codec("Sparsify", ratio=0.3),
        _codec("QSGD", bits=8),
        _codec("Sign"),
        _codec("SufficientFactors", rows=4),
        _codec("GradiVeQ", slice=8, components=4, samples=1),
        Choice(
            "CpSGD",
            {"sync": AllReduce(compression={"name": "CpSGD", "levels": 256, "trials": 8, "max_norm": 10})},
            "learns",
            True,
        ),
        Choice(
            "between hosts", {"sync": AllReduce(compression=codec.Uncompressed(between="hosts"))}, "equal"
        ),
        *(Choice(f"Zero {stage}", {"sync": Zero(stage=stage)}, "equal") for stage in (1, 2, 3)),
        Choice("LocalSGD", {"sync": LocalSGD(steps=2)}, "learns", True),
        Choice("DiLoCo", {"sync": DiLoCo(steps=2, outer_momentum=0.0)}, "learns", True),
        Choice(
            "streaming DiLoCo",
            {"sync": DiLoCo(steps=4, outer_momentum=0.0, fragments=2, delay=1, alpha=0.5, send="fp16")},
            "learns",
            True,
        ),
        Choice("ElasticAveraging", {"sync": ElasticAveraging(steps=2, alpha=0.5)}, "learns", True),
        Choice("ParameterServer 0", {"sync": ParameterServer(staleness=0)}, "equal", True),
        Choice("ParameterServer 1", {"sync": ParameterServer(staleness=1)}, "learns", True),
        Choice("ParameterServer", {"sync": ParameterServer(correction="staleness")}, "learns", True),
        Choice("Hogwild", {"sync": Hogwild()}, "learns", True),
    ],
    "mesh": [
        _mesh("data"),
        _mesh("shard", shard=2),
        _mesh("tensor", tensor=2),
        _mesh("tensor sequence_parallel", tensor=2, sequence_parallel=True),
        *(_pipeline(name) for name in ("1f1b", "naive", "gpipe", "zero_bubble")),
        *(_pipeline(name, virtual=2) for name in ("interleaved", "zbv")),
        *(_pipeline(name, "learns", True) for name in ("pipedream", "2bw")),
        _mesh("pipeline in sequence chunks", pipeline=Pipeline(2, sequence_chunks=2), extras=True),
        *(_mesh(f"sequence {name}", sequence=2, context=name) for name in ("ring", "gather", "ulysses")),
        _mesh("expert", expert=2),
        _mesh("data x shard", 4, data=2, shard=2),
        _mesh("data x tensor", 4, data=2, tensor=2),
        _mesh("data x pipeline", 4, data=2, pipeline=Pipeline(2)),
        _mesh("data x sequence", 4, data=2, sequence=2),
        _mesh("data x expert", 4, data=2, expert=2),
        _mesh("tensor x pipeline", 4, tensor=2, pipeline=Pipeline(2)),
        _mesh("tensor x sequence", 4, tensor=2, sequence=2),
    ],
    "optimizer": [
        Choice("momentum", {"optimizer": "momentum", "learningRate": 0.05}),
        Choice("adamw", {"optimizer": "adamw", "learningRate": 0.01, "weightDecay": 0.1}),
        Choice("lamb", {"optimizer": "lamb", "learningRate": 0.02}),
        Choice("adafactor", {"optimizer": "adafactor", "learningRate": 0.02}),
        Choice("adam8bit", {"optimizer": "adam8bit", "learningRate": 0.01}, "learns"),
        Choice("adam1bit", {"optimizer": "adam1bit", "learningRate": 0.01}, "learns"),
        Choice("own elementwise", {"optimizer": own_elementwise}),
        Choice("own whole", {"optimizer": own_whole}),
    ],
    "continuing": [
        NONE,
        Choice("restart", {"checkpointEverySteps": 2}, "equal"),
        Choice("resume", {"checkpointEverySteps": 2, "maxRestarts": 0}, "equal"),
        Choice("minWorkers", {"checkpointEverySteps": 2, "minWorkers": 1}, "equal"),
        Choice("certify", {"checkpointEverySteps": 2, "certify": True}, "equal", extras=True),
    ],
    "rates": [
        Choice("constant"),
        Choice("cosine", {"lrSchedule": "cosine", "warmupSteps": 2}),
        Choice("function", {"lrSchedule": halve}),
        Choice("LRScheduler", {"lrSchedule": decay}),
        Choice("scaled", {"scaleLearningRate": {"base_batch_size": 6, "rule": "sqrt"}}),
    ],
    "validation": [
        NONE,
        Choice("fraction", {"validationFraction": 0.25, "metrics": ["accuracy"]}),
        Choice("column", {"validationIndicatorCol": "held_out", "metrics": ["accuracy"]}),
        Choice("time", {"validationFraction": 0.25, "timeCol": "number"}),
    ],
    "best": [
        Choice("last"),
        Choice("keep best", {"keep": "best"}),
        Choice("early stopping", {"patience": 1, "minDelta": 1.0, "epochs": 3}),
    ],
    "activations": [
        NONE,
        Choice("disk", {"activationOffload": "disk"}, "equal"),
        Choice("bits", {"activationCompression": "bits"}, "equal"),
        Choice("int8", {"activationCompression": "int8"}, "learns"),
        Choice("fp8", {"activationCompression": "fp8"}, "learns"),
    ],
    "precision": [
        Choice("fp32"),
        Choice("bf16", {"precision": "bf16"}, "learns"),
        Choice("fp16", {"precision": "fp16"}, "learns"),
    ],
    "checkpointing": [
        NONE,
        Choice("sqrt", {"gradientCheckpointing": "sqrt"}, "equal"),
        Choice("all", {"gradientCheckpointing": "all"}, "equal"),
    ],
    "non-finite": [
        Choice("stop"),
        Choice("skip", {"onNonFinite": "skip"}, "equal"),
        Choice("rollback", {"onNonFinite": "rollback", "checkpointEverySteps": 2}, "equal"),
    ],
    "transform": [Choice("module", {}, "equal"), Choice("batch", {}, "equal"), Choice("stream", {}, "equal")],
    "training step": [NONE, Choice("own", {"trainingStep": classify}, "equal", extras=True)],
    "accumulation": [Choice("1", {}, "equal"), Choice("2", {"gradientAccumulation": 2}, "equal")],
    "collective": [
        Choice("torch", {"collective": "torch"}, "equal"),
        Choice("horovod", {"collective": "horovod"}, "equal"),
    ],
    "reader": [
        Choice("arrow", {"reader": "arrow"}, "equal"),
        Choice("petastorm", {"reader": "petastorm"}, "equal"),
    ],
    "rows": [Choice("copy", {"data": "copy"}, "equal"), Choice("in place", {"data": "inPlace"}, "equal")],
    "session": [Choice("Classic", {}, "equal"), Choice("Connect", {}, "equal")],
    "compile": [NONE, Choice("compile", {"compile": True}, "equal")],
    "clipping": [NONE, Choice("maxGradNorm", {"maxGradNorm": 0.3})],
    "average": [NONE, Choice("emaDecay", {"emaDecay": 0.5})],
    "adapters": [
        NONE,
        Choice("LoRA", lambda n: {"lora": LoRA(rank=2, targets=(n.linear,), train=(n.grouped,))}),
    ],
    "freezing": [NONE, Choice("freeze", lambda n: {"freeze": [n.frozen]})],
    "parameter groups": [
        NONE,
        Choice(
            "groups",
            lambda n: {
                "parameterGroups": [{"params": [n.grouped], "learningRate": 0.01, "weightDecay": 0.1}]
            },
        ),
    ],
    "batch sizes": [NONE, Choice("batchSizeSchedule", {"batchSizeSchedule": {2: 24}})],
    "callbacks": [NONE, Choice("callback", {}, "equal")],
    "weights": [NONE, Choice("weightCol", {"weightCol": "weight"})],
    "loss": [Choice("of the label"), Choice("of the module", {"loss": penalize_slopes}, extras=True)],
    "privacy": [NONE, Choice("DP-SGD", {"privacy": _PRIVACY}, "learns", extras=True)],
}

# A combination has one choice per group.
Combination = dict[str, str]

CHOICES: dict[str, dict[str, Choice]] = {
    group: {choice.name: choice for choice in choices} for group, choices in GROUPS.items()
}


def default(group: str) -> str:
    return GROUPS[group][0].name


def params_of(combination: Combination) -> dict[str, Any]:
    """Returns the Params that the choices set, without the callbacks."""
    network = NETWORKS[combination["columns"]]
    found: dict[str, Any] = network.params() | {"numWorkers": CHOICES["mesh"][combination["mesh"]].workers}
    for group, name in combination.items():
        params = CHOICES[group][name].params
        found |= params(network) if callable(params) else params
    if "minWorkers" in found:  # half of the workers are one replica of the meshes with 'data'
        found["minWorkers"] = found["numWorkers"] // 2
    return found


def plain(combination: Combination) -> Combination:
    """Returns the combination that must train to the same weights on one worker."""
    return {
        group: name if CHOICES[group][name].promise == "kept" else default(group)
        for group, name in combination.items()
    }


def promise(combination: Combination) -> str:
    """Returns 'learns' if any choice promises no more, else 'equal'."""
    found = {CHOICES[group][name].promise for group, name in combination.items()}
    return "learns" if "learns" in found else "equal"
