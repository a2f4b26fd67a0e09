import numpy as np
import pytest

from ringspark.pipelines import READERS, open_reader


@pytest.mark.parametrize("engine", sorted(READERS))
@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_of_a_wide_table_stay_together(ordered_shards, engine, shuffle):
    ids = np.arange(130)
    data = {
        # Two types have enough columns for a matrix each; the other types do not.
        **{f"f{i}": (ids * 100 + i).astype(np.float32) for i in range(40)},
        **{f"n{i}": ids * 1_000_000_007 + i for i in range(33)},
        **{f"b{i}": ids % (i + 2) == 0 for i in range(3)},
        "array": np.stack([ids, -ids], axis=1).astype(np.float32),
    }
    manifest = ordered_shards(data)
    seen = []
    for shard in range(2):
        reader = open_reader(
            manifest, batch_size=32, shard=shard, num_shards=2, seed=5, shuffle=shuffle, engine=engine
        )
        for batch in reader.batches(0):
            rows = batch["array"][:, 0].astype(int)
            seen += rows.tolist()
            for name, values in data.items():
                assert batch[name].dtype == values.dtype
                assert batch[name].flags.c_contiguous
                assert np.array_equal(batch[name], values[rows])
    assert sorted(seen) == ids.tolist()
