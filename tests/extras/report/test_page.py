"""The report page of a run: it shows the data of the run's folder, and needs no other file."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")


from read_page import Page
from small_training import config_of, epoch_record, train_gang

from ringspark.estimators.failures import Failure
from ringspark.estimators.launch.heartbeat import Beat
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.worker import TrainResult
from ringspark.extras.report import report
from ringspark.extras.report.content import seconds, show
from ringspark.extras.report.facts import RunFacts
from ringspark.extras.report.sections import headline
from ringspark.models import ModelSpec

EVIL = '<script>alert("x")</script>'
# The sections that show a file.
SECTIONS: dict[str, set[str]] = {
    "config.json": {"settings"},
    "environment.json": {"environment", "memory"},
    "data.json": {"data"},
    "history.json": set(),
    "result.json": set(),
}


def _rows(rows: int = 300) -> dict[str, np.ndarray[Any, Any]]:
    drawn = np.random.default_rng(3)
    x = drawn.normal(size=(rows, 3)).astype(np.float32)
    return {"x": x, "y": (x @ [1.0, -2.0, 0.5]).astype(np.float32)}


def _config(make_shards: Any, folder: Path, **changes: Any) -> TrainConfig:
    columns = changes.pop("columns", _rows())
    manifest = make_shards(columns, validation=np.arange(len(columns["y"])) % 4 == 0)
    spec = ModelSpec("mlp", {"in_features": 3, "hidden": [8], "out_features": 1})
    names = {"input_columns": (next(iter(columns)),), "model": spec, "epochs": 3}
    return config_of(manifest, folder / "run", **(names | changes))


def _report(config: TrainConfig, folder: Path) -> Page:
    report(config.run_uri, folder / "page.html")
    return Page.at(folder / "page.html")


def _trained(make_shards: Any, folder: Path, **changes: Any) -> tuple[TrainResult, Page]:
    config = _config(make_shards, folder, **changes)
    return train_here(config), _report(config, folder)


def test_the_numbers_of_the_page_are_those_of_the_run(make_shards: Any, tmp_path: Path) -> None:
    settings = {"metrics": ("mae", "r2"), "learning_rate": 0.25, "keep": "best"}
    result, page = _trained(make_shards, tmp_path, **settings)
    rate = result.rows / sum(record.seconds for record in result.history)
    assert page.cards.items() >= {
        ("state", "finished"),
        ("epochs", "3 of 3"),
        ("optimizer steps", show(result.steps)),
        ("rows seen", show(result.rows)),
        ("rows/s in epochs", f"{rate:,.0f}"),
        ("training time, including start", seconds(result.seconds)),
        ("epoch of the model", str(result.checkpoint_epoch)),
    }
    (results,) = page.tables["headline"]
    for entry in ("train_loss", "validation_loss", "train_mae", "validation_r2"):
        values = [record.value(entry) for record in result.history]
        best = max(values) if entry.endswith("r2") else min(values)
        told = results.row(entry)
        assert (told["last epoch"], told["best"]) == (show(values[-1]), show(best))
        assert told["at epoch"] == str(values.index(best) + 1)
    (epochs,) = page.tables["curves"]
    assert epochs.column("epoch") == ["1", "2", "3"]
    assert epochs.column("validation_mae") == [show(r.metrics["validation_mae"]) for r in result.history]

    splits, columns = page.tables["data"]
    assert splits.row("train")["rows"] == "225"
    assert splits.row("validation")["rows"] == "75"
    labels = _rows()["y"][np.arange(300) % 4 != 0].astype(np.float64)
    told = columns.row("y")
    assert float(told["mean"]) == pytest.approx(labels.mean(), abs=1e-4)
    assert float(told["max"]) == pytest.approx(labels.max(), abs=1e-3)


def test_of_equally_good_epochs_the_first_is_named() -> None:
    history = tuple(epoch_record(e, train_loss=x) for e, x in ((1, 2.0), (2, 1.0), (3, 1.0)))
    *_, table = headline.make(RunFacts(run_uri="", history=history))
    assert table.rows == [["train_loss", show(1.0), show(1.0), "2"]]


def test_each_setting_is_listed_once_beside_its_default(make_shards: Any, tmp_path: Path) -> None:
    _, page = _trained(make_shards, tmp_path, learning_rate=0.25)
    (chosen,) = page.tables["settings"]
    _, _, others = page.text["settings"].partition("At their defaults: ")
    pairs = [text.split(": ", 1) for text in others.strip().removesuffix(".").split("; ")]
    names = [*chosen.column("setting"), *(name for name, _ in pairs)]
    assert len(names) == len(set(names))
    assert chosen.row("learningRate") == {"setting": "learningRate", "value": "0.25", "default": "0.001"}
    assert "mlp" in chosen.row("model")["value"]
    assert ["precision", "fp32"] in pairs
    assert ["optimizer", "adamw"] in pairs


def test_the_page_stands_alone_and_is_small(make_shards: Any, tmp_path: Path) -> None:
    _, page = _trained(make_shards, tmp_path, log_every_steps=1, timeline_every_steps=1, epochs=12)
    html = (tmp_path / "page.html").read_text("utf-8")
    assert page.addresses == []
    assert page.tags["svg"] == html.count("<svg") >= 4
    # XML namespaces are not loaded, and nothing else looks like an address.
    assert "//" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", html)
    assert not {"script", "link", "iframe", "img", "object", "image"} & set(page.tags)
    assert len(html.encode()) < 600_000
    (shares,) = page.tables["time"]
    total = sum(float(text.removesuffix(" %")) for text in shares.column("mean over ranks"))
    assert total == pytest.approx(100, abs=0.5)


def test_names_that_are_markup_are_shown_as_letters(make_shards: Any, tmp_path: Path) -> None:
    columns = _rows()
    columns = {EVIL: columns["x"], "a$b$ & <b>": columns["y"], "y": columns["y"]}
    _, page = _trained(make_shards, tmp_path, columns=columns, epochs=1)
    assert "script" not in page.tags
    assert [text for text in page.tables["data"][1].column("column") if text][:2] == [EVIL, "a$b$ & <b>"]
    assert EVIL in page.tables["settings"][0].row("inputCols")["value"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SECTIONS)
def test_a_damaged_or_missing_file_leaves_its_part_out(make_shards: Any, tmp_path: Path, name: str) -> None:
    sections = SECTIONS[name]
    config = _config(make_shards, tmp_path, epochs=1)
    train_here(config)
    whole = set(_report(config, tmp_path).tables)
    file = Path(config.run_uri) / name
    file.write_text('{"a":')
    damaged = _report(config, tmp_path)
    assert f"{name} could not be read" in damaged.text["headline"]
    assert set(damaged.tables) == whole - sections
    file.unlink()
    missing = _report(config, tmp_path)
    assert "could not be read" not in missing.text["headline"]
    # The shards still exist, and replace the missing data of data.json.
    assert set(missing.tables) == (whole if name == "data.json" else whole - sections)
    if name not in ("history.json", "result.json"):
        assert f"does not hold: {name}" in missing.text["headline"]
    assert missing.cards["state"] == ("finished" if name != "result.json" else "not finished")


def test_a_run_that_trains_is_reported_by_its_last_position(make_shards: Any, tmp_path: Path) -> None:
    config = _config(make_shards, tmp_path)
    train_here(config)
    run = Path(config.run_uri)
    (run / "result.json").unlink()
    (run / "history.json").write_text(json.dumps([]))
    position = {"epoch": 2, "epochs": 3, "step": 9, "num_steps": 24, "rows": 260, "seconds": 2.0}
    (run / "progress.json").write_text(json.dumps(position))
    page = _report(config, tmp_path)
    cards = {"state": "not finished", "epochs": "0 of 3", "rows/s in epochs": "130"}
    assert page.cards.items() >= cards.items()
    assert "step 9 of 24, epoch 2" in page.text["headline"]


def test_a_run_that_failed_before_its_first_epoch_says_why(make_shards: Any, tmp_path: Path) -> None:
    config = _config(make_shards, tmp_path)
    run = Path(config.run_uri)
    (run / "heartbeat").mkdir(parents=True)
    (run / "config.json").write_text(config.to_json())
    (run / "owner.json").write_text("{}")
    failure = Failure.of(RuntimeError(f"no space {EVIL}"), 1, "training, epoch 1, step 3", False)
    state = {"token": "t", "task": 1, "pid": 9, "launch": 0, "phase": "training", "ticks": 3, "beats": 5}
    beat = Beat(rank=1, host="b", failure=failure.to_json(), **state)
    (run / "heartbeat" / "rank-1.json").write_text(json.dumps(asdict(beat)))
    page = _report(config, tmp_path)
    assert page.cards["state"] == "failed"
    assert "No epoch has been finished." in page.text["headline"]
    assert page.tables["faults"][0].row("1")["failure"] == f"RuntimeError: no space {EVIL}"


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no run; give the runUri of a training"):
        report(tmp_path, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.distributed
@pytest.mark.slow
def test_every_rank_is_noted_with_its_host_and_its_memory(make_shards: Any, tmp_path: Path) -> None:
    config = replace(_config(make_shards, tmp_path, epochs=1), num_workers=2, collective="torch")
    train_gang(config)
    page = _report(config, tmp_path)
    (memory,) = page.tables["memory"]
    assert sorted(memory.column("rank")) == ["0", "1"]
    assert all(text.endswith("MiB") for text in memory.column("peak of the process"))
    assert page.tables["environment"][1].column("ranks") == ["2"]
