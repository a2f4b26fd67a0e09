"""Files that ringspark 0.1.0 wrote can be read, under the same `format_version`."""

import pickle

import pytest
from torch import nn

from ringspark.estimators.training.checkpoint.weights import parse_info
from ringspark.estimators.training.run_environment import DataFacts

CHECKPOINT = (
    b'{"epoch": 2, "step": 12, "num_bytes": 212, "num_tensors": 2, "checkpoint_id": '
    b'"ef4f83badabb4652b7450eb422640eb8", "format_version": 1, "training_sha256": null}'
)
DATA = (
    '{"uri": "/shards", "columns": [{"name": "x", "kind": "float32[4]", "source": ""}], "splits": {"train": '
    '{"rows": 9, "files": 1, "num_bytes": 99, "row_groups": 1, "group_rows": [9, 9, 9]}}, "stats": {}, '
    '"skipped_rows": 0, "is_table": false}'
)


def test_the_record_of_a_checkpoint() -> None:
    assert parse_info(CHECKPOINT, "/run").step == 12


def test_the_facts_about_the_data() -> None:
    assert DataFacts.from_json(DATA).to_json() == DATA


@pytest.mark.parametrize(
    "path", ["ringspark.models.linear Linear", "ringspark.extras.tables.tabular_ensemble TabularEnsemble"]
)
def test_a_pickled_network_of_ours(path: str) -> None:
    module, name = path.split()
    kind = pickle.loads(f"c{module}\n{name}\n.".encode())
    assert issubclass(kind, nn.Module)
