"""Settings for batches that are larger than those of one worker: what they do to the steps and rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from ringspark.estimators.names import nearest
from ringspark.estimators.training.optimizers.rate_scaling import RULES
from ringspark.estimators.training.settings.declaration import Setting

_SCALING_KEYS: dict[str, Any] = {"baseBatchSize": None, "warmupEpochs": 0.0}


def _hides_gradients(given: Mapping[str, Any]) -> bool:
    """Whether no step shows the gradients of a part of the batch and those of the whole."""
    if given["numWorkers"] == 1:
        return bool(given["gradientAccumulation"] == 1)
    found = (
        given["sharding"],
        given["gradientCompression"],
        given["consistency"]["name"],
        given["localSteps"],
    )
    return found != ("none", {"name": "none"}, "bsp", 1)


def _scaling(value: Any) -> dict[str, Any]:
    """Returns the setting with all keys of its name."""
    given = dict(value) if isinstance(value, Mapping) else {"name": value}
    name = given.pop("name", None)
    if name != "none" and (not isinstance(name, str) or name not in RULES):
        raise ValueError(
            f"scaleLearningRate must be 'none' or a dict whose name is one of {', '.join(map(repr, RULES))}, "
            f"got {name!r}{nearest(str(name), ['none', *RULES])}"
        )
    keys = {} if name == "none" else _SCALING_KEYS
    for key in given:
        if key not in keys:
            takes = f"takes the keys {list(keys)}" if keys else "takes no other key"
            raise ValueError(
                f"scaleLearningRate of name {name!r} {takes}, got {key!r}{nearest(str(key), keys)}"
            )
    found = {"name": name, **keys, **given}
    if name == "none":
        return found
    if not _is_whole(found["baseBatchSize"], 1):
        raise ValueError(
            "scaleLearningRate needs its baseBatchSize, the batch size for which learningRate is right, such "
            f"as {{'name': {name!r}, 'baseBatchSize': 256}}, a whole number of at least 1, got "
            f"{found['baseBatchSize']!r}"
        )
    epochs = found["warmupEpochs"]
    if isinstance(epochs, bool) or not isinstance(epochs, int | float) or not 0 <= epochs < inf:
        raise ValueError(f"scaleLearningRate's warmupEpochs must be 0 or above and finite, got {epochs!r}")
    return {**found, "warmupEpochs": float(epochs)}


def _schedule(value: Any) -> list[list[int]]:
    """Returns pairs [epoch, batch size] in the order of their epochs."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    is_list = isinstance(pairs, Sequence) and not isinstance(pairs, str)
    if not is_list or not all(isinstance(p, Sequence) and len(p) == 2 for p in pairs):
        raise ValueError(
            "batchSizeSchedule must map epochs to batch sizes, such as {4: 512, 7: 1024} or "
            f"[[4, 512], [7, 1024]], got {value!r}"
        )
    # JSON has no numbers as keys.
    found = [[int(e) if isinstance(e, str) and e.isdecimal() else e, size] for e, size in pairs]
    for epoch, size in found:
        if not _is_whole(epoch, 2):
            raise ValueError(
                "batchSizeSchedule's epochs must be whole numbers from 2, as batchSize is the first epoch's, "
                f"got {epoch!r}"
            )
        if not _is_whole(size, 1):
            raise ValueError(
                f"batchSizeSchedule's sizes must be whole numbers of at least 1, got {size!r} from epoch "
                f"{epoch} on"
            )
    found.sort()
    epochs = [epoch for epoch, _ in found]
    if twice := [epoch for epoch in epochs if epochs.count(epoch) > 1]:
        raise ValueError(
            f"batchSizeSchedule must have one size for an epoch, got two for epoch {twice[0]}; drop one"
        )
    return found


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_of_one_size(given: Mapping[str, Any]) -> bool:
    """Whether every batch has the size from which rates are scaled."""
    sizes = {given["batchSize"], *(size for _, size in given["batchSizeSchedule"])}
    return sizes == {given["scaleLearningRate"].get("baseBatchSize")}


SCALE_LEARNING_RATE = Setting[dict[str, Any]](
    name="scaleLearningRate",
    field="scale_learning_rate",
    words="how rates follow the batch size: 'none', or {'name': 'linear', 'baseBatchSize': b, "
    "'warmupEpochs': e}, which multiplies them by batch size / b, or by its square root with the name "
    "'sqrt', as for Adam; over the first e epochs, a fraction is fine, they rise from learningRate to that, "
    "before the schedule",
    default={"name": "none"},
    default_words="`'none'`",
    convert=_scaling,
    without_effect=(_is_of_one_size, "batchSize is its baseBatchSize in every epoch"),
)
BATCH_SIZE_SCHEDULE = Setting[list[list[int]]](
    name="batchSizeSchedule",
    field="batch_size_schedule",
    words="other batch sizes by epoch, which count from 1: {4: 512, 7: 1024} or [[4, 512], [7, 1024]], as it "
    "is kept, takes batches of 512 rows from the fourth epoch on and of 1024 from the seventh; of batchSize "
    "before",
    default=[],
    convert=_schedule,
    without_effect=(
        lambda given: bool(given["batchSizeSchedule"]) and given["batchSizeSchedule"][0][0] > given["epochs"],
        "there are not so many epochs",
    ),
)
NOISE_SCALE = Setting(
    name="noiseScale",
    field="noise_scale",
    words="whether the history holds the gradient noise scale of each epoch, which `advise_batch_size` "
    "reads; it costs two passes over the gradients per step",
    default=False,
    may_differ_on_resume=True,
    without_effect=(
        _hides_gradients,
        "it compares the gradients of two batch sizes, which takes two workers that sum whole gradients in "
        "every step (sharding and gradientCompression 'none', consistency 'bsp', localSteps 1), or one with "
        "gradientAccumulation",
    ),
)
