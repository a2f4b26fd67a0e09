"""Certificates: honest runs hold, each kind of forgery is found, and model-signing verifies the signature."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing_callback import Fails
from forged_runs import FORGERS, draw_rows, load_run, reseal_checkpoint, train_honest
from hypothesis import given
from hypothesis import strategies as st
from signing_keys import write_keys
from torch import nn

from ringspark.estimators import user_code
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.reading import read_record
from ringspark.estimators.training.checkpoint.snapshot import OPTIMIZER
from ringspark.estimators.training.checkpoint.weights import WEIGHTS, read_info
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.certificate import certify, verify_run
from ringspark.extras.certificate.chain import (
    Chain,
    Link,
    chain_uri,
    find_breaks,
    read_chain,
    reseal,
    write_chain,
)
from ringspark.extras.certificate.claimed_run import check_claims
from ringspark.extras.certificate.claims import digest_objects
from ringspark.extras.certificate.compare import measure_distance
from ringspark.extras.certificate.recorder import digest_weights
from ringspark.extras.certificate.replay import list_intervals
from ringspark.extras.certificate.verification import check_interval, find_probability
from ringspark.models import ModelSpec


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def rows() -> dict[str, np.ndarray]:
    return draw_rows(0)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory, rows: dict[str, np.ndarray]) -> Path:
    return train_honest(tmp_path_factory.mktemp("honest"), rows, seed=1)


@pytest.fixture
def copy(honest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest, tmp_path / "run"))


def test_every_interval_of_an_honest_run_is_repeated_to_the_bit(honest: Path) -> None:
    found = verify_run(honest, intervals=None)
    assert found.holds, found.table()
    assert found.num_drawn == found.num_intervals == 4
    assert {check.note for check in found.replays} == {"equal to the bit"}
    assert len(found.replays) == 6  # the initial and the final weights too


@pytest.mark.parametrize("kind", FORGERS)
def test_a_forgery_is_found_by_its_intervals_alone(kind: str, honest: Path, rows: Any, tmp_path: Any) -> None:
    forged = FORGERS[kind](honest, tmp_path / "run", rows, random.Random(kind))
    run, objects = load_run(tmp_path / "run"), UserObjects()
    assert not any(check.problem for check in check_claims(run, objects, None))
    checked = [check_interval(run, interval, objects) for interval in list_intervals(run)]
    assert sum(bool(check.problem) for check in checked) == forged


def test_model_signing_alone_verifies_the_signature_and_finds_a_changed_file(copy: Path) -> None:
    private, public = write_keys(copy.parent)
    assert certify(str(copy), private).signature == str(copy / "certificate" / "run.sig")
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(copy), "--signature"]
    command += [str(copy / "certificate" / "run.sig"), "--public_key", str(public)]
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert verify_run(copy, intervals=1, key=public).holds
    (copy / "history.json").write_text("[]")
    found = verify_run(copy, intervals=1, key=public)
    assert found.problems[0].startswith("The signature does not hold: Signature mismatch")
    assert "history.json" in found.problems[0]
    assert not found.replays


def test_another_key_than_the_signer_s_is_found(copy: Path) -> None:
    certify(str(copy), write_keys(copy.parent)[0])
    found = verify_run(copy, intervals=1, key=write_keys(copy.parent)[1])
    assert found.problems[0].startswith("The signature does not hold")


def test_a_removed_checkpoint_and_an_edited_link_break_the_chain(copy: Path) -> None:
    chain = read_chain(str(copy))
    assert not find_breaks(chain)
    without = [link for link in chain.links if link.step != 6]
    assert find_breaks(Chain(links=tuple(without)))
    text = json.loads(Path(chain_uri(str(copy))).read_text())
    text["links"][0]["content"]["config"]["seed"] = 5
    Path(chain_uri(str(copy))).write_text(json.dumps(text))
    assert "Link 0 (start, step 0)" in verify_run(copy, intervals=1).problems[0]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))


def _load_other_weights(run: Path) -> None:
    """Names other weights, which a resume or a load would take."""
    shutil.copytree(run / "checkpoint", run / "best-1")
    result = json.loads((run / "result.json").read_text())["result"]
    _edit(run / "result.json", result=result | {"checkpoint_uri": str(run / "best-1")})


def _improve(path: Path) -> None:
    path.write_text(path.read_text().replace('"train_loss": ', '"train_loss": 1'))


@contextmanager
def _resealed(run: Path) -> Iterator[tuple[Link, ...]]:
    """Yields the links of a chain to change, and writes them as a consistent chain."""
    links = read_chain(str(run)).links
    yield links
    write_chain(str(run), reseal(links))


def _forget_first_weights(run: Path) -> None:
    with _resealed(run) as links:
        links[0].content["identity"]["model"]["first weights"] = "unknown"


def _hide_settings(run: Path) -> None:
    """Adds an earlier start. The config of a start decides its replay, and its identity is shown."""
    chain = read_chain(str(run))
    last = [link for link in chain.links if link.kind == "start"][-1]
    config = last.content["config"] | {"learning_rate": 0.5}
    resumed = Chain().add("start", 0, last.content | {"config": config})
    for link in chain.links[1:]:
        resumed = resumed.add(link.kind, link.step, link.content)
        if link.step == 4 and link.kind == "checkpoint":
            resumed = resumed.add("start", 4, last.content)
    write_chain(str(run), resumed)


# What is edited, and the problem.
EDITS: dict[str, tuple[Callable[[Path], None], str]] = {
    "weight": (lambda run: _flip(run / "checkpoints/step-0000000006" / WEIGHTS), "has another SHA-256"),
    "last weight": (lambda run: _flip(run / "checkpoint" / WEIGHTS), "are not the ones in the hash chain"),
    "result": (_load_other_weights, "result.json names other final weights than the hash chain: "),
    "start": (_hide_settings, "Start 1 claims other settings than its own: learningRate: 0.01 -> 0.5."),
    "first weights": (_forget_first_weights, "first weights: 'unknown' -> null"),
    **{
        name: (
            lambda run, name=name: _edit(run / name, forged=1),
            f"{name} is not the file in the hash chain.",
        )
        for name in ("config.json", "data.json", "environment.json", "checkpoint/checkpoint.json")
    },
    **{
        f"history in {name}": (
            lambda run, name=name: _improve(run / name),
            f"The history in {name} is not the one of the checkpoints.",
        )
        for name in ("history.json", "result.json")
    },
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_run_is_found_without_a_replay(copy: Path, name: str) -> None:
    edit, message = EDITS[name]
    edit(copy)
    (problem,) = verify_run(copy, intervals=1).problems
    assert message in problem


def test_final_weights_that_do_not_follow_from_the_training_are_found(copy: Path) -> None:
    _flip(copy / "checkpoint" / WEIGHTS)
    chain = read_chain(str(copy))
    content = chain.links[-1].content | {"files": digest_weights(str(copy / "checkpoint"))}
    write_chain(str(copy), reseal(chain.links[:-1]).add("end", chain.links[-1].step, content))
    (problem,) = verify_run(copy, intervals=1).problems
    assert problem == "The claim of final weights does not hold: training again gives other weights."


class _Net(nn.Sequential):
    def __init__(self, width: int = 8) -> None:
        super().__init__(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 1))


def test_a_resumed_run_holds_for_its_own_module_alone(rows: Any, tmp_path: Path) -> None:
    objects = UserObjects(module=_Net(), callbacks=(Fails(tmp_path / "failed", step=5),))

    def train(config: TrainConfig) -> None:
        with pytest.raises(RuntimeError, match="step 5"):
            train_here(config, objects)
        train_here(config, objects)

    run = train_honest(tmp_path, rows, seed=2, train=train, model=None, keep="best", monitor="train_loss")
    starts = [link.step for link in read_chain(str(run)).links if link.kind == "start"]
    assert starts == [0, 4]
    found = verify_run(run, objects, intervals=None)
    assert found.holds, found.table()
    other = verify_run(run, lambda: replace(objects, module=_Net()), intervals=2, seed=0)
    assert other.holds  # its initial weights differ, so those are not checked
    assert [check.name for check in other.replays if not check.is_done] == ["initial weights"]
    wider = verify_run(run, UserObjects(module=_Net(9), callbacks=objects.callbacks), intervals=1)
    assert "The given model differs from the trained one: shapes of the weights" in wider.problems[0]
    with pytest.raises(ValueError, match="a run holds no code; give model="):
        verify_run(run, intervals=1)


def test_a_run_resumes_if_it_died_before_the_link_of_its_first_checkpoint(copy: Path) -> None:
    run = load_run(copy)
    for step in (2, 4, 6, 8):
        shutil.rmtree(run.checkpoint_uri(step))
    write_chain(str(copy), reseal(run.chain.links[:1]))
    train_here(run.config(run.chain.links[0].content))
    found = verify_run(copy, intervals=None)
    assert found.holds, found.table()
    assert found.num_intervals == 4


def test_a_chain_without_the_first_checkpoint_says_so(copy: Path) -> None:
    chain = read_chain(str(copy))
    later = [link for link in chain.links if (link.kind, link.step) != ("checkpoint", 0)]
    write_chain(str(copy), reseal(later))
    (check,) = [check for check in verify_run(copy, intervals=1).replays if not check.is_done]
    assert check.note == "the chain begins at step 2, and nothing shows how its weights came about"


def _with_metrics(position: Any) -> Any:
    return replace(position, history=tuple(replace(e, metrics={"train_rmse": 0.1}) for e in position.history))


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (lambda r: replace(r, ranks=[{**r.ranks[0], "stop_reason": "patience"}]), "state of rank 0"),
        (lambda r: replace(r, position=_with_metrics(r.position)), "other losses or metrics"),
    ],
    ids=["early stop", "metric"],
)
def test_forged_metrics_and_early_stops_are_found_by_a_replay(copy: Path, forge: Any, message: str) -> None:
    folder = copy / "checkpoints" / "step-0000000008"
    reseal_checkpoint(folder, forge(read_record(str(folder))), set())
    _relink(copy, 8)
    run = load_run(copy)
    last = list_intervals(run)[-1]
    assert message in check_interval(run, last, UserObjects()).problem


def test_no_code_in_the_run_s_folder_runs(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = copy.parent / "mark"
    copy = copy.rename(copy.parent / "run_of_a_stranger")
    (copy / "hidden.py").write_text(
        f"import torch\nopen({str(mark)!r}, 'w').close()\nclass Net(torch.nn.Linear):\n    pass\n"
    )
    spec = ModelSpec("run_of_a_stranger.hidden:Net", {"in_features": 4, "out_features": 1})
    with _resealed(copy) as links:
        links[0].content["config"]["model"] = spec.to_json()
    monkeypatch.syspath_prepend(str(copy.parent))
    with pytest.raises(ValueError, match=r"model 'run_of_a_stranger\.hidden:Net' is not imported"):
        verify_run(copy, intervals=1)
    assert not mark.exists()


def _relink(run: Path, step: int) -> None:
    """Writes the hash of a changed checkpoint into the chain."""
    info = read_info(str(run / "checkpoints" / f"step-{step:010d}"))
    with _resealed(run) as links:
        for link in links:
            if (link.kind, link.step) == ("checkpoint", step):
                link.content["training_sha256"] = info.training_sha256


def _claim_another_machine(run: Path) -> None:
    with _resealed(run) as links:
        links[0].content["platform"]["cpu kernels"] = "of another machine"


def test_other_final_weights_are_found_on_another_machine(copy: Path) -> None:
    weights = {name: tensor + 0.1 for name, tensor in tensor_file.read(copy / "checkpoint" / WEIGHTS).items()}
    with (copy / "checkpoint" / WEIGHTS).open("wb") as file:
        tensor_file.write(weights, file)
    with _resealed(copy) as links:
        links[-1].content["files"] = digest_weights(str(copy / "checkpoint"))
    _claim_another_machine(copy)
    (problem,) = verify_run(copy, intervals=1).problems
    assert "The claim of final weights does not hold: training again gives weights at a distance" in problem


DECAY = {"weight_decay": 9.0}


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (None, "another optimizer state: 'exp_avg' at a distance of"),
        (
            lambda r: replace(r, position=replace(r.position, rate_scales=(9.0,))),
            "another rate scales of the",
        ),
        (lambda r: replace(r, optimizer_groups=[r.optimizer_groups[0] | DECAY]), "another optimizer groups"),
    ],
    ids=["moments", "rate", "decay"],
)
def test_a_forged_state_is_found_on_another_machine(copy: Path, forge: Any, message: str) -> None:
    _claim_another_machine(copy)
    folder = copy / "checkpoints" / "step-0000000004"
    record, changed = read_record(str(folder)), set()
    if forge is None:
        changed = {OPTIMIZER}
        state = {name: tensor.clone() for name, tensor in tensor_file.read(folder / OPTIMIZER).items()}
        state["head.weight/exp_avg"] += 1.0
        with (folder / OPTIMIZER).open("wb") as file:
            tensor_file.write(state, file)
    else:
        record = forge(record)
    reseal_checkpoint(folder, record, changed)
    _relink(copy, 4)
    run = load_run(copy)
    checked = check_interval(run, list_intervals(run)[1], UserObjects())
    assert message in checked.problem


def test_the_digest_of_code_sees_a_changed_function_and_no_copy(tmp_path: Path) -> None:
    def made(factor: float) -> UserObjects:
        source = "def halve(step, num_steps):\n    return scale(step) * 0.5\n"
        source += f"def scale(step):\n    return {factor}\n"
        names: dict[str, object] = {"__name__": "__main__"}
        exec(source, names)
        return UserObjects(lr_schedule=names["halve"])

    assert digest_objects(made(0.5)) == digest_objects(made(0.5))
    assert digest_objects(made(0.5)) != digest_objects(made(0.25))
    assert digest_objects(UserObjects(losses=(None,))) == digest_objects(UserObjects())
    assert digest_objects(user_code.loads(user_code.dumps(made(0.5)))) == digest_objects(made(0.5))


def test_a_run_of_another_machine_is_compared_within_a_tolerance(rows: Any, tmp_path: Path) -> None:
    plain = ModelSpec("mlp", {"in_features": 4, "hidden": [8], "out_features": 1}).to_json()
    run = train_honest(tmp_path, rows, seed=3, model=plain, epochs=1, checkpoint_every_steps=2)
    _claim_another_machine(run)
    found = verify_run(run, intervals=None)
    assert found.holds, found.table()
    assert [check.note for check in found.replays[:2]] == ["distance 0 of the change"] * 2
    left, right = (load_run(run).checkpoint_uri(step) for step in (0, 4))
    assert measure_distance(left, right, left) == pytest.approx(1.0, rel=1e-5)


def test_dropout_on_another_number_of_workers_is_refused(honest: Path) -> None:
    with pytest.raises(ValueError, match="each of its 1 workers has its own, so 2 workers cannot repeat it"):
        verify_run(honest, intervals=1, workers=2)


@given(st.integers(1, 12), st.data())
def test_the_stated_probability_is_the_share_of_draws_that_hit(intervals: int, data: st.DataObject) -> None:
    forged = data.draw(st.integers(0, intervals))
    replayed = data.draw(st.integers(0, intervals))
    draws = list(combinations(range(intervals), replayed))
    hits = sum(any(number < forged for number in draw) for draw in draws)
    assert find_probability(intervals, forged, replayed) == pytest.approx(hits / len(draws))
    if forged == 1:
        assert find_probability(intervals, 1, replayed) == pytest.approx(replayed / intervals)
