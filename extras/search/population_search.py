"""`PopulationSearch`: an estimator that trains copies of another estimator with changing settings."""

from __future__ import annotations

from typing import Any

from ringspark.estimators.stages.declared import value_of
from ringspark.extras.search.population import Population
from ringspark.extras.search.population_loop import STATE, PopulationLoop
from ringspark.extras.search.search_params import PopulationParams
from ringspark.extras.search.search_stage import SearchStage
from ringspark.extras.search.space import Space
from ringspark.extras.search.trainings import ROUND, Trainings
from ringspark.models.meta_device import build_on_meta

# Params that a resumed training takes from its settings and not from its checkpoint.
_CHANGEABLE = ("learningRate", "maxGradNorm")
_SPEC = "model."


class PopulationSearch(PopulationParams, SearchStage):
    """Population based training: copies of an estimator train concurrently and learn from the best.

    After each round the worst members resume from the checkpoint of one of the best, with slightly changed
    settings. The result is a schedule of settings over the training, not one setting::

        search = PopulationSearch(
            estimator=TorchClassifier(model=network, validationFraction=0.2, metrics=["auroc"], epochs=12),
            space={"learningRate": Uniform(1e-4, 1e-1, log=True)},
            monitor="validation_auroc",
            population=8,
            epochsPerRound=2,
            parallelism=4,
        )
        model = search.fit(df)
        model.trials  # a line per round and member

    The estimator's `epochs` are the epochs of all rounds together, so a learning-rate schedule spans the
    whole training. All members start from the same weights and see the rows in the same order. A checkpoint
    is copied completely: weights, optimizer state, random states and history. Callbacks start and end with
    each round.

    The constructor's keywords are the Params below.
    """

    MARKS = (STATE, ROUND)

    def _checked_estimator(self) -> Any:
        estimator = super()._checked_estimator()
        ends = {estimator.getParam(name): value_of(estimator, name) for name in ("keep", "patience")}
        if estimator.getKeep() == "best" or estimator.getPatience() is not None:
            raise ValueError(
                "PopulationSearch resumes members from the last epoch, so the estimator must keep the last "
                "epoch; set keep='last' and leave patience unset"
            )
        # Set, so that the recipe of a table does not keep the best epoch or stop early.
        return estimator.copy(ends)

    def _check_space(self, space: Space, estimator: Any) -> None:
        _check_changeable(space, estimator)

    def _make_loop(self, trainings: Trainings, epochs: int, about: dict[str, str]) -> PopulationLoop:
        rules = ("population", "epochsPerRound", "quantile", "perturbation")
        population = Population(
            ranges=trainings.space.ranges,
            size=self.getPopulation(),
            quantile=self.getQuantile(),
            perturbation=self.getPerturbation(),
            seed=self.getSeed(),
            is_larger_better=trainings.objective.is_larger_better,
        )
        return PopulationLoop(
            trainings,
            population,
            about=about | {name: repr(self.getOrDefault(name)) for name in rules},
            epochs=epochs,
            epochs_per_round=self.getEpochsPerRound(),
        )


def _check_changeable(space: Space, estimator: Any) -> None:
    """Raises ValueError for settings that cannot change when a training resumes from a checkpoint."""
    if not space.ranges:
        raise ValueError("space of a PopulationSearch must be a dict from Params to ranges, got a callable")
    own_rate = not isinstance(estimator.getOrDefault("optimizer"), str)
    for name, values in space.ranges.items():
        if name == "learningRate" and own_rate:
            raise ValueError(
                "space names 'learningRate', but the optimizer's factory sets the learning rate; set "
                "optimizer to a name such as 'sgd'"
            )
        if name in _CHANGEABLE:
            continue
        if not name.startswith(_SPEC):
            raise ValueError(
                f"space of a PopulationSearch may only hold {', '.join(_CHANGEABLE)}, or 'model.x' for an "
                f"argument that keeps the shapes of the weights, got {name!r}; search it with OptunaSearch"
            )
        shapes = [_shapes(space.applied({name: end}).getModel()) for end in values.ends()]
        if any(found != shapes[0] for found in shapes):
            raise ValueError(
                f"space gives {name!r} values that change the shapes of the network's weights, so no member "
                "could resume from another; search it with OptunaSearch"
            )


def _shapes(spec: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in build_on_meta(spec.build).state_dict().items()}
