"""Hyperparameter search for the flights on the validation month: the network against boosting, in equal time.

Each search samples its grid in a seeded order until it has used `--seconds`. It starts with the recipe of
recipes.py. The search that has used less time runs next. A recipe trains on months 1 to 8, and its score
is the ROC AUC of month 9. Only one member of the network's ensemble trains, so that more recipes can run.
Boosting is scored after every 50 iterations of one training. The test months are not read.

    OMP_NUM_THREADS=1 make bench ARGS="flights_tuning"
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import harness
import precision
from sklearn.metrics import average_precision_score, roc_auc_score

import recipes
import score
from ringspark.estimators.launch.local import train_here
from ringspark.jobs import cli
from ringspark.pipelines import ShardManifest

NETWORKS: dict[str, Sequence[Any]] = {
    "hidden": [(128, 64), (256, 128), (512, 256)],
    "dropout": [0.1, 0.2, 0.4],
    "embedding_dropout": [0.1, 0.3],
    "epochs": [3, 5, 8],
    "learning_rate": [1e-3, 3e-3, 1e-2],
    "weight_decay": [1e-2, 1e-1],
}
BOOSTINGS: dict[str, Sequence[Any]] = {
    "max_iter": [600],
    "learning_rate": [0.03, 0.05, 0.1],
    "max_leaf_nodes": [15, 31, 63, 127],
    "min_samples_leaf": [20, 100, 500],
    "l2_regularization": [0.0, 10.0],
    "max_features": [0.3, 0.6, 1.0],
}
ITERATIONS = 50  # boosting iterations between two evaluations on the validation month
SHOWN = 5  # printed recipes per search

# ROC AUC and average precision of month 9, and the recipe.
Judged = tuple[float, float, recipes.NetworkRecipe | recipes.BoostingRecipe]


def draw(first: Any, grid: Mapping[str, Sequence[Any]]) -> Iterator[Any]:
    """Yields `first`, then the recipes of the grid in a seeded order."""
    yield first
    combinations = list(itertools.product(*grid.values()))
    random.Random(0).shuffle(combinations)
    for values in combinations:
        yield replace(first, **dict(zip(grid, values, strict=True)))


def judge_network(
    recipe: recipes.NetworkRecipe, root: Path, sizes: tuple[list[int], int], members: int
) -> Judged:
    """Trains on one rank in this process, and returns the validation metrics."""
    job = precision.flights_job(root, sizes, recipe, members)
    with tempfile.TemporaryDirectory() as folder:
        result = train_here(replace(job.config, run_uri=folder))
        logits, labels = precision.predict(job, result)
    return job.metrics["ROC AUC"](logits, labels), job.metrics["average precision"](logits, labels), recipe


def judge_boosting(recipe: recipes.BoostingRecipe, train: Any, validation: Any) -> Judged:
    """Trains once, and returns the best number of iterations on the validation month."""
    boosting = score.train_boosting(recipe, train, seed=0)
    stages = boosting.staged_predict_proba(score.boosting_matrix(validation))
    labels = validation["label"]
    return max(
        (
            float(roc_auc_score(labels, stage[:, 1])),
            float(average_precision_score(labels, stage[:, 1])),
            replace(recipe, max_iter=number),
        )
        for number, stage in enumerate(stages, start=1)
        if number % ITERATIONS == 0
    )


def search(
    judges: Mapping[str, Callable[[Any], Judged]], recipes_of: Mapping[str, Iterator[Any]], seconds: int
) -> tuple[dict[str, list[Judged]], dict[str, float]]:
    """Returns the results of each search, the best first, and the used seconds."""
    found: dict[str, list[Judged]] = {name: [] for name in judges}
    spent = dict.fromkeys(judges, 0.0)
    while min(spent.values()) < seconds:
        name = min(spent, key=spent.__getitem__)
        recipe = next(recipes_of[name])
        started = time.perf_counter()
        found[name].append(judges[name](recipe))
        spent[name] += time.perf_counter() - started
        print(f"{name}, {spent[name]:.0f} s: {found[name][-1]}", flush=True)
    return {name: sorted(judged, key=lambda one: -one[0]) for name, judged in found.items()}, spent


def main() -> None:
    """Runs both searches, then prints their best recipes and the recipe of examples/flights/recipes.py."""
    options = harness.parse(__doc__, seconds=(720, 1), members=(1, 1))
    root = harness.flights_root(options)
    manifest = ShardManifest.load(str(root / "shards"))
    train, validation = (score.read_split(manifest, split) for split in ("train", "validation"))
    with cli.spark("ringspark flights tuning", harness.MASTER):
        sizes = precision.feature_sizes(root)
    found, spent = search(
        {
            "network": lambda recipe: judge_network(recipe, root, sizes, options.members),
            "boosting": lambda recipe: judge_boosting(recipe, train, validation),
        },
        {"network": draw(recipes.NETWORK, NETWORKS), "boosting": draw(recipes.BOOSTING, BOOSTINGS)},
        options.seconds,
    )
    lines = []
    for name, standing in (("network", recipes.NETWORK), ("boosting", recipes.BOOSTING)):
        print(f"{name}: {len(found[name])} recipes in {spent[name]:.0f} s; best: {found[name][0][2]}")
        for auc, precision_, recipe in found[name][:SHOWN]:
            words = ", ".join(f"{key} {value}" for key, value in asdict(recipe).items())
            mark = " (stands)" if recipe == standing else ""
            lines.append([f"{name}: {words}{mark}", f"{auc:.4f}", f"{precision_:.4f}"])
    harness.print_table(
        f"flights_tuning: month 9, {len(found['network'])} and {len(found['boosting'])} recipes",
        ["", "ROC AUC", "average precision"],
        lines,
    )


if __name__ == "__main__":
    main()
