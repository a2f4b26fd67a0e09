"""Each test fails if a new version of a library no longer has a limit that docs/design.md names."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from torch import nn
from torch.distributed import TCPStore
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader


def test_torchs_checkpoint_stores_the_input_of_every_block() -> None:
    saved, values = [], torch.randn(16, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda nothing: nothing):
        for block in [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(9)]:
            values = checkpoint(block, values, use_reentrant=False)
    assert len([tensor for tensor in saved if tensor.shape == (16, 8)]) == 9  # three segments need three


def test_torchs_adafactor_cannot_step_without_numbers() -> None:
    weight = nn.Parameter(torch.zeros(4, 4, device="meta"))
    weight.grad = torch.zeros_like(weight)
    with pytest.raises(RuntimeError, match="cannot be called on meta tensors"):
        torch.optim.Adafactor([weight]).step()


def test_torchs_average_of_16_bit_weights_stays_where_it_is() -> None:
    network = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(network.weight)
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    average.update_parameters(network)
    nn.init.constant_(network.weight, 1.5)
    for _ in range(1000):
        average.update_parameters(network)
    assert average.module.weight[0, 0] == 1  # and not 1.32


class Code:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("made-by-the-file",)


def test_torchs_export_load_runs_code_of_the_file(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),)), "good.pt2")
    torch.save(Code(), "code.pt")
    with zipfile.ZipFile("good.pt2") as good, zipfile.ZipFile("bad.pt2", "w") as bad:
        code = Path("code.pt").read_bytes()
        for name in good.namelist():
            bad.writestr(name, code if name.endswith("sample_inputs/model.pt") else good.read(name))
    with pytest.raises((AssertionError, TypeError)):
        torch.export.load("bad.pt2")
    assert os.path.isdir("made-by-the-file")


def test_a_stranger_writes_into_torchs_store() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stranger = TCPStore("127.0.0.1", store.port, is_master=False)
    stranger.set("address of rank 0", "elsewhere")
    assert store.get("address of rank 0") == b"elsewhere"


class Counted(io.BytesIO):
    """Counts the bytes that are read."""

    num_bytes = 0

    def read(self, size: int | None = -1) -> bytes:
        found = super().read(size)
        self.num_bytes += len(found)
        return found


def test_pyarrow_reads_whole_row_groups() -> None:
    written = io.BytesIO()
    table = pa.table({"x": np.random.default_rng(0).random(1_000_000)})
    pq.write_table(table, written, write_page_index=True)
    file = Counted(written.getvalue())
    rows = pq.ParquetFile(file, buffer_size=1 << 16)
    for _ in rows.iter_batches(1000, row_groups=[0]):
        pass  # the last 1,000 rows come last
    assert file.num_bytes > 0.99 * len(written.getvalue())
    assert not [name for name in dir(rows) if "page" in name]


def test_torchs_dataloader_has_no_state() -> None:
    assert not hasattr(DataLoader, "state_dict")


def test_pyyaml_reads_numbers_as_strings_and_takes_duplicate_keys() -> None:
    assert yaml.safe_load("rate: 1e-3") == {"rate": "1e-3"}
    assert yaml.safe_load("{n: 1, n: 2}") == {"n": 2}
