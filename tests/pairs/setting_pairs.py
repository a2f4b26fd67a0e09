"""The table of all pairs of settings: refused with a sentence, meaningless with a reason, or working."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import NamedTuple

from covering import Pair, Value, all_pairs, cover
from setting_choices import CHOICES, GROUPS, Combination

NAMES: dict[str, list[str]] = {group: [one.name for one in choices] for group, choices in GROUPS.items()}


@cache
def matching(group: str, patterns: str) -> list[str]:
    """Returns the choices of a group whose names fit patterns such as "tensor*|expert"."""
    wanted = patterns.split("|")
    assert all(any(fnmatchcase(name, one) for name in NAMES[group]) for one in wanted), (group, patterns)
    return [name for name in NAMES[group] if any(fnmatchcase(name, one) for one in wanted)]


class Rule(NamedTuple):
    """Pairs of choices that do not work.

    Attributes:
        choices: Groups and patterns of names, such as ("mesh", "tensor*|sequence*").
        sentence: Pattern of the error's message, or the reason why the pair has no meaning.
    """

    choices: tuple[Value, ...]
    sentence: str

    def fits(self, combination: Mapping[str, str]) -> bool:
        return all(
            group in combination and combination[group] in matching(group, patterns)
            for group, patterns in self.choices
        )


def _rules(*lines: tuple[str, ...]) -> list[Rule]:
    """Makes a rule of each line: two or more "group: patterns", then the sentence."""
    found = []
    for *choices, sentence in lines:
        pairs = tuple((group, names.strip()) for group, _, names in (c.partition(":") for c in choices))
        assert all(matching(*choice) for choice in pairs)
        found.append(Rule(pairs, sentence))
    return found


SHARD = "shard|data x shard"
_PIPELINES = "pipeline*|data x pipeline|tensor x pipeline"
_SEQUENCES = "sequence*|data x sequence|tensor x sequence"
_TENSORS = "tensor*|data x tensor"
_EXPERTS = "expert|data x expert"
# Meshes with less than the whole network or less than whole rows on a worker.
CUT = f"{_PIPELINES}|{_SEQUENCES}|{_TENSORS}|{_EXPERTS}"
OF_SHARDS = "FP16|BF16|PowerSGD|TopK|RandomK|Sparsify|QSGD|Sign|SufficientFactors|GradiVeQ"
COMPRESSED = f"{OF_SHARDS}|CpSGD"
ALONE = "LocalSGD|DiLoCo|streaming DiLoCo|ElasticAveraging"
APART = "ParameterServer*|Hogwild"
NOT_ZERO = f"all-reduce|between hosts|{COMPRESSED}|{ALONE}|{APART}"
_NOT_ALL_REDUCE = f"between hosts|{COMPRESSED}|Zero*|{ALONE}|{APART}"
_WHOLE = "lamb|adafactor|adam8bit"
_PACKED = "disk|bits|int8|fp8"
_DELAYED = "pipeline pipedream|pipeline 2bw"
_BAGS = "ragged|sparse|sparse gradients"

# The first rule that a pair fits is its rule.
REFUSED = _rules(
    (
        f"columns: series|windows|image|{_BAGS}",
        f"mesh: {_TENSORS}",
        "'tensor' needs a plan of the layers to shard",
    ),
    (
        f"columns: numbers|struct|series|windows|image|{_BAGS}",
        f"mesh: {_SEQUENCES}",
        "does not support parallelism's 'sequence'",
    ),
    ("columns: numbers|struct", "mesh: tensor sequence_parallel", "does not support sequence_parallel=True"),
    (
        "columns: ids with experts",
        "mesh: tensor sequence_parallel",
        "needs whole rows for its own part of the loss",
    ),
    (
        f"columns: numbers|struct|ids|text|series|windows|image|{_BAGS}",
        f"mesh: {_EXPERTS}",
        "needs a mixture of experts",
    ),
    (f"columns: {_BAGS}", f"mesh: {_PIPELINES}", "links"),
    (
        "columns: numbers|struct|ids|ids with experts|text|image",
        "mesh: pipeline in sequence chunks",
        "needs two consecutive layers that support sequence chunks",
    ),
    (f"sync: {NOT_ZERO}", f"mesh: {SHARD}", r"'shard' sets the workers over which sync=Zero\(...\) shards"),
    (
        f"sync: {COMPRESSED}|between hosts",
        f"mesh: {_EXPERTS}",
        "compresses gradients of parameters that all workers have, .* set sync=AllReduce",
    ),
    ("sync: between hosts", f"mesh: {CUT}", "needs the whole network"),
    ("sync: CpSGD", f"mesh: {CUT}", "needs the whole network"),
    (
        f"sync: {ALONE}|{APART}",
        f"mesh: {CUT}",
        "needs all workers to synchronize in every step, .*; set sync=AllReduce",
    ),
    (
        "sync: Zero 3",
        f"mesh: {_PIPELINES}|{_EXPERTS}",
        "needs all workers that have shards of a block to run it",
    ),
    (
        "sync: Zero 3",
        "mesh: tensor sequence_parallel",
        "sequence_parallel needs parameters that sync does not shard",
    ),
    ("sync: Zero 2", f"mesh: {_PIPELINES}|tensor sequence_parallel", "workers still add to them after it"),
    ("sync: Zero 1", f"mesh: {_DELAYED}", "gives a step gradients of an earlier step, or none"),
    (f"sync: {COMPRESSED}", "optimizer: adam1bit", "uses the second moments of the uncompressed steps"),
    ("sync: Zero 3", f"optimizer: {_WHOLE}", "needs whole parameters .* leaves each worker a shard"),
    ("sync: ParameterServer*", f"optimizer: {_WHOLE}", "gives each server a shard of every parameter"),
    (f"sync: {ALONE}", "precision: fp16", "lets each worker step on its own"),
    (f"sync: {APART}", "precision: fp16", "lets each worker step on its own"),
    (f"sync: {ALONE}", "non-finite: skip|rollback", "lets each worker step on its own"),
    (f"sync: {APART}", "non-finite: skip|rollback", "lets each worker step on its own"),
    (f"sync: {ALONE}", "average: emaDecay", "needs the same weights on every worker"),
    (
        "sync: ParameterServer|ParameterServer 1|Hogwild",
        "average: emaDecay",
        "needs the same weights on every worker",
    ),
    ("sync: Hogwild", "checkpointing: sqrt|all", "computes activations again in the backward pass"),
    ("sync: Zero 3", "collective: horovod", "which collective 'horovod' does not have"),
    ("sync: Zero 3", f"activations: {_PACKED}", "needs activations that stay in memory unchanged"),
    ("sync: Zero 3", "compile: compile", "compile \\(True\\) fuses operations"),
    (f"mesh: {CUT}|{SHARD}", "collective: horovod", "needs collectives over some of the workers"),
    (f"mesh: {_TENSORS}|{_EXPERTS}", f"optimizer: {_WHOLE}", "needs whole parameters"),
    ("sync: ParameterServer*|Zero 3", "optimizer: own whole", "splits parameters at any element"),
    (f"mesh: {_TENSORS}|{_EXPERTS}", "optimizer: own whole", "gives a worker only shards of parameters"),
    (f"mesh: {CUT}", "optimizer: adam1bit", "needs the whole network"),
    ("mesh: shard|tensor*|pipeline*|sequence*|expert", "continuing: minWorkers", "workers of one replica"),
    (f"mesh: {_PIPELINES}", f"activations: {_PACKED}", "needs one forward pass at a time"),
    (f"mesh: {_DELAYED}", "precision: fp16", "gives a step gradients of an earlier step, or none"),
    (f"mesh: {_DELAYED}", "non-finite: rollback", "gives a step gradients of an earlier step, or none"),
    (
        f"mesh: {_PIPELINES}|{_SEQUENCES}|{_EXPERTS}|tensor sequence_parallel",
        "compile: compile",
        "needs all layers and whole rows in one pass",
    ),
    (f"sync: {APART}|CpSGD", "continuing: certify", "certify needs steps that can be repeated"),
    ("non-finite: rollback", "continuing: certify", "certify needs steps that can be repeated"),
    ("rows: in place", "continuing: certify", "keeps the rows and every checkpoint"),
    ("columns: windows", "rows: in place", "plan has"),
    (
        f"sync: {COMPRESSED}|between hosts|Zero*|{ALONE}|{APART}",
        "training step: own",
        "trainingStep needs a plain all-reduce",
    ),
    (f"mesh: {CUT}", "training step: own", "trainingStep needs the whole network"),
    (f"mesh: {SHARD}", "training step: own", r"'shard' sets the workers over which sync=Zero\(...\) shards"),
    (f"activations: {_PACKED}", "training step: own", "trainingStep runs its own"),
    ("accumulation: 2", "training step: own", "trainingStep runs its own"),
    ("compile: compile", "training step: own", "trainingStep runs its own"),
    ("non-finite: skip|rollback", "training step: own", "trainingStep runs its own"),
    ("privacy: DP-SGD", f"columns: {_BAGS}", "some inputs are arrays of any length"),
    ("privacy: DP-SGD", "columns: text", "pads rows to the longest of their batch"),
    ("privacy: DP-SGD", "columns: ids with experts", "privacy bounds the loss of each row alone"),
    ("privacy: DP-SGD", f"sync: {_NOT_ALL_REDUCE}", "privacy needs a plain all-reduce"),
    ("privacy: DP-SGD", f"mesh: {CUT}", "privacy needs the whole network"),
    ("privacy: DP-SGD", f"mesh: {SHARD}", r"'shard' sets the workers over which sync=Zero\(...\) shards"),
    ("privacy: DP-SGD", "training step: own", "privacy clips the gradient of each row"),
    ("privacy: DP-SGD", "loss: of the module", "privacy clips the gradient of each row"),
    ("privacy: DP-SGD", "continuing: certify", "privacy keeps its samples and its noise secret"),
    ("privacy: DP-SGD", "compile: compile", "privacy clips the gradient of each row"),
    ("privacy: DP-SGD", "precision: fp16", "privacy must not show whether a row is there"),
    ("privacy: DP-SGD", "non-finite: skip|rollback", "privacy must not show whether a row is there"),
    ("privacy: DP-SGD", "checkpointing: sqrt|all", "privacy clips the gradient of each row"),
    ("privacy: DP-SGD", f"activations: {_PACKED}", "privacy clips the gradient of each row"),
    ("privacy: DP-SGD", "batch sizes: batchSizeSchedule", "changes the share of the rows"),
    ("privacy: DP-SGD", "validation: fraction|time", "would take validation rows from the same people"),
    ("privacy: DP-SGD", "best: keep best|early stopping", "needs values of the training rows without noise"),
    (f"activations: {_PACKED}", "compile: compile", "compile .* needs activations that stay in memory"),
    ("loss: of the module", "compile: compile", "compile .* needs a loss with first derivatives only"),
    ("loss: of the module", "activations: int8|fp8", "needs a loss with first derivatives only"),
    ("loss: of the module", "sync: Zero 3", "needs a loss with first derivatives only"),
    (
        "loss: of the module",
        f"mesh: {_PIPELINES}|{_SEQUENCES}|{_EXPERTS}|tensor sequence_parallel",
        "needs all layers and whole rows in one pass on each worker",
    ),
)

MEANINGLESS = _rules(
    (
        "optimizer: own elementwise|own whole",
        "training step: own",
        "with trainingStep the function gets the module in place of the parameters",
    ),
    (
        "adapters: LoRA",
        "freezing: freeze",
        "freeze has no effect, and fit says so: lora freezes all but its adapters",
    ),
    (
        f"sync: {OF_SHARDS}",
        "mesh: tensor|tensor sequence_parallel|pipeline*|tensor x pipeline",
        "compression has no effect, and fit says so: a mesh with one replica all-reduces no gradients",
    ),
)


@cache
def rule_of(pair: Pair) -> Rule | None:
    """Returns the rule that excludes a pair; None if the pair works."""
    values = dict(pair)
    return next((rule for rule in (*REFUSED, *MEANINGLESS) if rule.fits(values)), None)


def status(pair: Pair) -> str:
    rule = rule_of(pair)
    return "works" if rule is None else "refused" if rule in REFUSED else "meaningless"


PAIRS: list[tuple[Value, Value]] = all_pairs(NAMES)

_OUT = {frozenset(pair) for pair in PAIRS if status(frozenset(pair)) != "works"}


def is_allowed(chosen: Mapping[str, str], value: Value) -> bool:
    """Returns whether `value` works with all chosen values."""
    return not any(frozenset((value, other)) in _OUT for other in chosen.items())


@cache
def fits() -> tuple[list[Combination], set[Pair]]:
    """Returns combinations that cover the working pairs, and the working pairs in no combination.

    Combinations whose weights must equal the plain training come first, so that a pair of two such choices
    is compared by weights.
    """
    exact = {
        group: [choice.name for choice in choices if choice.promise != "learns"]
        for group, choices in GROUPS.items()
    }
    working = [frozenset(pair) for pair in PAIRS if frozenset(pair) not in _OUT]
    equal = [pair for pair in working if all(name in exact[group] for group, name in pair)]
    first, impossible = cover(exact, equal, is_allowed)
    second, too = cover(NAMES, [pair for pair in working if pair not in impossible], is_allowed, first)
    return [*first, *second], impossible | too


def beside(pair: tuple[Value, Value]) -> Combination:
    """Returns the pair, completed by the first choice of each other group that works with the rest.

    If a group has no such choice, its default completes the pair: 'shard' needs Zero, which its refused
    partner may refuse too.
    """
    chosen = dict(pair)
    for group, names in NAMES.items():
        if group not in chosen:
            # Nothing works with both 'shard', which needs Zero, and a choice that needs the all-reduce.
            chosen[group] = next((name for name in names if is_allowed(chosen, (group, name))), names[0])
    return {group: chosen[group] for group in NAMES}


def is_of_extras(combination: Mapping[str, str]) -> bool:
    return any(CHOICES[group][name].extras for group, name in combination.items())
