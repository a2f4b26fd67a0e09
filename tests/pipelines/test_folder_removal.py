"""One function removes folders, and only what this package wrote there."""

from pathlib import Path

import fsspec
import pytest

from ringspark.estimators import run_layout
from ringspark.pipelines.folder_removal import SHARD_PATHS, discard, list_paths, remove_folder

RUN_FILES = (
    "owner.json",
    "run.json",
    "result.json",
    ".result.json.0123456789abcdef",
    "shards/manifest.json",
    "shards/_shards-0123456789ab/part-00000-0123456789ab-train.parquet",
    "checkpoints/step-0000000010/part-00000-of-00002.a1b2.json",
    "checkpoint/model.safetensors",
    "best-3/checkpoint.json",
    "tracking/tensorboard/events.out.tfevents.1.host.2.0",
    "timeline/rank-0-0.json",
    "certificate/chain.json",
)


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


@pytest.mark.parametrize(
    "foreign",
    [
        "notes.txt",
        "model/ringspark.json",  # a model that was saved inside the run
        "checkpoint/metadata/part-00000",
        "shards/mine.csv",
        "tracking/run-2/result.json",
        "logs/rank-0.txt/inner",
    ],
)
@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_a_folder_with_a_foreign_file_stays_whole(tmp_path: Path, foreign: str, scheme: str) -> None:
    root = f"{scheme}{tmp_path}"
    files = fsspec.filesystem(scheme.partition(":")[0] or "file")
    for name in (*RUN_FILES, foreign):
        files.makedirs(f"{tmp_path}/{name}".rpartition("/")[0], exist_ok=True)
        files.pipe_file(f"{tmp_path}/{name}", b"{}")
    with pytest.raises(
        ValueError, match=f"kept, because it holds '{foreign}', which ringspark did not write"
    ):
        remove_folder(root, run_layout.PATHS, run_layout.OWNER)
    assert len(files.find(str(tmp_path))) == len(RUN_FILES) + 1
    files.rm(f"{tmp_path}/{foreign}")
    remove_folder(root, run_layout.PATHS, run_layout.OWNER)
    assert not files.find(str(tmp_path))


def test_a_folder_of_somebody_else_stays(tmp_path: Path) -> None:
    fill(tmp_path / "ours", "manifest.json")
    with pytest.raises(ValueError, match=r"no 'owner.json' in it shows that this run or job made it"):
        remove_folder(str(tmp_path / "ours"), SHARD_PATHS, "owner.json")
    with pytest.raises(ValueError, match=r"no 'manifest.json' in it shows that this run or job"):
        remove_folder(str(tmp_path / "ours"), SHARD_PATHS, "manifest.json", lambda held: held == b"mine")
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    with pytest.raises(ValueError, match="is kept, because it is a link"):
        remove_folder(str(tmp_path / "link"), SHARD_PATHS)
    fill(tmp_path / "data", "rows.csv")
    (tmp_path / "ours" / "more").symlink_to(tmp_path / "data")
    assert sorted(list_paths(str(tmp_path / "ours"))) == ["manifest.json", "more"]
    discard(str(tmp_path / "ours"), SHARD_PATHS)
    assert (tmp_path / "ours" / "manifest.json").exists()
    discard(str(tmp_path / "absent"), SHARD_PATHS)
