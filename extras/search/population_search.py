"""`PopulationSearch`: an estimator that trains copies of another estimator with changing settings."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from pyspark.sql import DataFrame

from ringspark.estimators.checked_fit import CheckedFit, check_settings
from ringspark.estimators.launch.python_daemon import choose_daemon
from ringspark.estimators.prepared_fit import prepare_fit
from ringspark.estimators.stages.declared import value_of
from ringspark.extras.search.objective import Objective
from ringspark.extras.search.population import Population
from ringspark.extras.search.population_loop import ROUND, STATE, PopulationLoop
from ringspark.extras.search.search_model import SearchModel
from ringspark.extras.search.search_params import PopulationParams
from ringspark.extras.search.search_stage import SearchStage
from ringspark.extras.search.space import Space
from ringspark.extras.search.trial_data import TrialData
from ringspark.models.meta_device import build_on_meta
from ringspark.pipelines.columns import check_frame

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

    def _fit(self, dataset: DataFrame) -> SearchModel:
        check_frame(dataset, "PopulationSearch.fit")
        estimator = self._checked_estimator()
        # Set, so that the recipe of a table does not keep the best epoch or stop early.
        ends = {estimator.getParam(name): value_of(estimator, name) for name in ("keep", "patience")}
        estimator = estimator.copy(ends)
        held = self._held_space()
        known = check_settings(estimator, dataset)
        _check_changeable(Space(held, known), known.estimator)
        run_uri = self._checked_run(dataset, STATE, f"{ROUND}-")
        prepared = prepare_fit(estimator, dataset, search_uri=run_uri)
        dataset = prepared.dataset
        space = Space(held, prepared)
        fit = CheckedFit.of(prepared.estimator, dataset)
        if fit.config.looks_for_best:
            raise ValueError(
                "PopulationSearch resumes members from the last epoch, so the estimator must keep the last "
                "epoch; set keep='last' and leave patience unset"
            )
        choose_daemon(dataset.sparkSession, fit.config.use_gpu)
        with (
            self._split(dataset, fit) as split,
            closing(TrialData(split.training, run_uri, split.num_rows)) as data,
        ):
            manifest = data.manifest(fit.data)
            if run_uri is not None:
                prepared.keep_plan(run_uri)
            objective = Objective.of(fit, manifest, self.getMonitor(), self.getEvaluator(), split.held_out)
            rules = ("population", "epochsPerRound", "quantile", "perturbation", "seed")
            loop = PopulationLoop(
                population=Population(
                    ranges=space.ranges,
                    size=self.getPopulation(),
                    quantile=self.getQuantile(),
                    perturbation=self.getPerturbation(),
                    seed=self.getSeed(),
                    is_larger_better=objective.is_larger_better,
                ),
                space=space,
                objective=objective,
                data=data,
                dataset=split.training,
                run_uri=run_uri,
                about={
                    **space.fixed_settings(fit, manifest),
                    "space": space.text,
                    "value": objective.text,
                    **{name: repr(self.getOrDefault(name)) for name in rules},
                },
                epochs=fit.config.epochs,
                epochs_per_round=self.getEpochsPerRound(),
            )
            model, settings, rows = loop.run(self.getParallelism())
        model._describe_columns(prepared.uses)
        found = SearchModel()._set_found(model, settings, rows)
        found._resetUid(self.uid)
        return found


def _check_changeable(space: Space, estimator: Any) -> None:
    """Raises ValueError for settings that cannot change when a training resumes from a checkpoint."""
    if space.varies("learningRate") and not space.ranges:
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
