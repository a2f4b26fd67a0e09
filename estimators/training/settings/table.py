"""Every setting of the estimators, by its name as a Param."""

from __future__ import annotations

from ringspark.estimators.training.settings.data import (
    Classification,
    Columns,
    Data,
    Inputs,
    Label,
    Labels,
    Offset,
    Prediction,
    Regression,
)
from ringspark.estimators.training.settings.memory import Budget, Memory
from ringspark.estimators.training.settings.network import Metrics, Model, Network, Objects
from ringspark.estimators.training.settings.observation import Observation, Progress
from ringspark.estimators.training.settings.recovery import Recovery, RunFolder
from ringspark.estimators.training.settings.setting import Section, Setting, settings_of
from ringspark.estimators.training.settings.training import Steps, Training
from ringspark.estimators.training.settings.workers import Workers

SECTIONS: tuple[type[Section], ...] = (
    *(Inputs, Label, Offset, Labels, Columns, Data, Prediction, Classification, Regression, Model, Metrics),
    *(Objects, Network, Training, Steps, Workers, Memory, Budget),
    *(Recovery, RunFolder, Observation, Progress),
)
SETTINGS: dict[str, Setting] = settings_of(*SECTIONS)
