"""The timeline of a training: the records of each rank, and no side effects."""

import json
import threading
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from rank_spans import one_step
from ranks import TORCH_AND_SLOW_OTHERS, run_ranks
from small_training import columns_of, config_of, train_ranks, weights_of
from torch import nn

from ringspark.estimators import run_layout
from ringspark.estimators.collectives import Collective
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.stages.summary import TrainingSummary
from ringspark.estimators.training.observation import background_file
from ringspark.estimators.training.observation.timeline import NO_TIMELINE, now_ns
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.extras.timeline import rank_timeline as timeline
from ringspark.extras.timeline.clocks import ClockOffset, interpolate_offset, measure_offset
from ringspark.extras.timeline.span_file import read_spans
from ringspark.extras.timeline.trace import OTHER, TraceSlice, make_slices, time_shares
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest, storage

SPEC = ModelSpec("mlp", {"in_features": 4, "hidden": [16, 16], "out_features": 1})
SHIFT_NS = 5_000_000_000
_config = partial(config_of, model=SPEC)


@pytest.fixture
def manifest(make_shards: Any) -> ShardManifest:
    """23 steps of at most 32 rows per epoch, and held-out rows."""
    return make_shards(columns_of(803), validation=np.arange(803) % 10 == 0)


def _compare_shifted(collective: Collective) -> Any:
    """Shifts rank 1's clock by 5 s, and rank 2's by -10 s."""
    shift = (0, SHIFT_NS, -2 * SHIFT_NS)[collective.rank]
    found, moment = measure_offset(collective, lambda: now_ns() + shift)
    return [found.offset_ns - shift, found.error_ns, moment.unix_ns]


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
def test_a_shifted_clock_is_found_within_its_own_bound(collective: str) -> None:
    """The ranks of one host share a clock, so the shift is the whole difference."""
    first, *others = run_ranks(3, collective, _compare_shifted)
    assert first[:2] == [0, 0]
    for wrong_by, error, unix in others:
        assert abs(wrong_by) <= error < SHIFT_NS / 10
        assert unix == first[2]


def test_between_two_comparisons_a_clock_drifts_evenly() -> None:
    known = tuple(ClockOffset(at_ns=at, offset_ns=offset, error_ns=1) for at, offset in ((100, 0), (200, 40)))
    assert [interpolate_offset(known, at) for at in (0, 100, 125, 200, 900)] == [0, 0, 10, 40, 40]


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
def test_every_nth_step_of_every_rank_is_on_one_axis(manifest: Any, tmp_path: Path, collective: str) -> None:
    settings = {"timeline_every_steps": 5, "checkpoint_every_steps": 20}
    config = _config(manifest, tmp_path / "run", num_workers=3, collective=collective, **settings)
    result = train_ranks(config)[0]
    ranks = read_spans(result.run_uri)
    assert [spans.rank for spans in ranks] == [0, 1, 2]
    assert len({spans.start for spans in ranks}) == 1
    for spans in ranks:
        assert [step.step for step in spans.steps] == list(range(5, 47, 5))
        assert spans.taken_steps == 46
        assert [rare.kind for rare in spans.rare].count("validation") == 2
        assert [rare.step for rare in spans.rare if rare.kind == "checkpoint"] == [20, 40]
    pieces = make_slices(ranks)
    for rank in range(3):
        _check_nesting([piece for piece in pieces if piece.rank == rank])
    # No rank leaves a collective call before the last one has entered, within the clocks' accuracy.
    error = 2 * max(offset.error_ns for spans in ranks for offset in spans.offsets)
    for step in range(5, 47, 5):
        exchanges = [piece for piece in pieces if piece.step == step and piece.kind == "exchange"]
        assert len(exchanges) == 3
        assert max(e.begin_ns for e in exchanges) <= min(e.end_ns for e in exchanges) + error
    rows = [sum(p.rows or 0 for p in pieces if p.is_whole and p.step == step) for step in range(5, 47, 5)]
    assert set(rows) == {32}
    for own in time_shares(result.run_uri).values():
        assert sum(own.values()) == pytest.approx(1)
        assert own.keys() >= {"read", "forward", "backward", "exchange", "step"}
        assert own.keys() >= {"checkpoint", "validation", OTHER}
        assert all(0 <= share <= 1 for share in own.values())


def _check_nesting(own: list[TraceSlice]) -> None:
    """Spans of a kind follow each other. Parts are inside their step, waits inside their communication."""
    for kind in {piece.kind for piece in own if not piece.lane}:
        same = [piece for piece in own if piece.kind == kind]
        assert all(before.end_ns <= after.begin_ns for before, after in pairwise(same)), kind
    parts = [piece for piece in own if not piece.is_whole and piece.kind != "wait" and not piece.lane]
    assert all(before.end_ns <= after.begin_ns for before, after in pairwise(parts))
    wholes = {piece.step: piece for piece in own if piece.is_whole}
    for piece in own:
        if piece.rows is not None and not piece.is_whole:
            whole = wholes[piece.step]
            assert whole.begin_ns <= piece.begin_ns <= piece.end_ns <= whole.end_ns
        if piece.kind == "wait":
            (exchange,) = (e for e in own if e.kind == "exchange" and e.begin_ns == piece.begin_ns)
            assert piece.end_ns <= exchange.end_ns


class _LateRank(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.distributed.get_rank() == 1:
            threading.Event().wait(0.05)
        return super().forward(x)


@pytest.mark.distributed
def test_the_others_wait_for_the_late_rank(manifest: ShardManifest, tmp_path: Path) -> None:
    settings = {"num_workers": 3, "collective": "torch", "timeline_every_steps": 4}
    config = _config(manifest, tmp_path / "run", model=None, epochs=1, **settings)
    pieces = make_slices(read_spans(train_ranks(config, UserObjects(module=_LateRank(4, 1)))[0].run_uri))
    waits = [piece for piece in pieces if piece.kind == "wait"]
    waited = [0, 0, 0]
    for piece in waits:
        waited[piece.rank] += piece.end_ns - piece.begin_ns
    for step in range(4, 24, 4):
        assert {piece.rank for piece in waits if piece.step == step} >= {0, 2}
    # A busy machine may delay another rank in one step, but not by 50 ms in each step.
    assert min(waited[0], waited[2]) > waited[1]


def test_a_wait_follows_the_exchange_that_encloses_it() -> None:
    pieces = make_slices([one_step(rank, 2, spans=(("exchange", 5 * rank, 8),)) for rank in (0, 1)])
    assert [piece.kind for piece in pieces if piece.rank == 0] == ["step 1", "exchange", "wait"]


@pytest.mark.distributed
def test_a_training_is_bitwise_the_same_with_it(manifest: ShardManifest, tmp_path: Path) -> None:
    spec = ModelSpec("mlp", {"in_features": 4, "hidden": [8], "out_features": 1, "dropout": 0.3})
    config = _config(manifest, tmp_path / "off", model=spec, num_workers=2, collective="torch")
    watched = replace(config, run_uri=str(tmp_path / "on"), timeline_every_steps=1, profile_steps=(3, 4))
    off, on = (train_ranks(c)[0] for c in (config, watched))
    assert torch.equal(weights_of(off, spec.build()), weights_of(on, spec.build()))
    assert [r.train_loss for r in off.history] == [r.train_loss for r in on.history]
    assert not (tmp_path / "off" / run_layout.TIMELINE).exists()
    assert not (tmp_path / "off" / run_layout.PROFILE).exists()
    assert len(read_spans(on.run_uri)) == 2


def test_off_makes_no_object_in_a_step() -> None:
    batches, state = iter(()), cast("Any", None)
    assert NO_TIMELINE.steps(batches, state) is batches
    assert NO_TIMELINE.span("forward") is NO_TIMELINE.span("backward")


def test_a_store_that_refuses_the_files_ends_no_training(manifest: Any, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "run").mkdir()
    for name in (run_layout.TIMELINE, run_layout.PROFILE):
        # A file in place of the folder, so that the file system cannot write below it.
        (tmp_path / "run" / name).write_bytes(b"")
    result = train_here(_config(manifest, tmp_path / "run", timeline_every_steps=1, profile_steps=(2, 3)))
    assert result.steps == 46
    said = [record.getMessage() for record in caplog.records if "continues without it" in record.getMessage()]
    # On a slow machine the timeline is first written during the training, before the profile.
    assert sorted(t.split(" was not written")[0] for t in said) == ["the profile", "the timeline of rank 0"]


def test_a_hanging_store_holds_no_training_up(manifest: Any, tmp_path: Path, monkeypatch: Any) -> None:
    answers, write = threading.Event(), storage.write_atomic

    def hang(uri: str, data: bytes, **options: Any) -> None:
        if run_layout.TIMELINE in uri:
            answers.wait(60)
        write(uri, data, **options)

    monkeypatch.setattr(storage, "write_atomic", hang)
    monkeypatch.setattr(background_file, "END_SECONDS", 0.0)
    monkeypatch.setattr(timeline, "WRITE_SECONDS", 0.0)
    try:
        assert train_here(_config(manifest, tmp_path / "run", timeline_every_steps=1)).steps == 46
        assert not (tmp_path / "run" / run_layout.TIMELINE).exists()
    finally:
        answers.set()
        for thread in threading.enumerate():
            if thread.name == "ringspark-observation":
                thread.join()


def test_a_resumed_run_writes_a_file_of_its_own(manifest: ShardManifest, tmp_path: Path) -> None:
    settings = {"num_workers": 2, "collective": "torch", "epochs": 1, "checkpoint_every_steps": 10}
    config = _config(manifest, tmp_path / "run", **settings)
    first = train_ranks(replace(config, timeline_every_steps=2))[0]
    # The checkpoint of step 20 exists, because `train_ranks`, unlike a fit, does not remove it.
    again = train_ranks(replace(config, timeline_every_steps=1))[0]
    assert again.resumed_steps == (20,)
    early, late = ([spans for spans in read_spans(first.run_uri) if spans.every == every] for every in (2, 1))
    assert [spans.rank for spans in early] == [spans.rank for spans in late] == [0, 1]
    assert early[0].start < late[0].start
    assert [step.step for step in late[0].steps] == [21, 22, 23]


def test_the_file_is_bounded_and_covers_the_training(manifest: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(timeline, "MOST_SPANS", 40)
    result = train_here(_config(manifest, tmp_path / "run", timeline_every_steps=1))
    (spans,) = read_spans(result.run_uri)
    assert spans.every == 8
    assert [step.step for step in spans.steps] == [8, 16, 24, 32, 40]


def test_a_step_of_many_micro_batches_has_a_bound(manifest: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(timeline, "MOST_SPANS_OF_A_STEP", 10)
    config = _config(manifest, tmp_path / "run", timeline_every_steps=20, gradient_accumulation=16)
    (spans,) = read_spans(train_here(config).run_uri)
    assert [len(step.spans) for step in spans.steps] == [10, 10]
    assert spans.left_out == 2 * (1 + 2 * 16 + 2 - 10)


def test_the_trace_has_what_perfetto_needs(manifest: ShardManifest, tmp_path: Path) -> None:
    result = train_here(_config(manifest, tmp_path / "run", timeline_every_steps=10))
    path = str(tmp_path / "trace.json")
    assert TrainingSummary.of(result).timeline(path) == path
    trace = json.loads(Path(path).read_text())
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "M"}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert isinstance(event["tid"], int)
            assert event["ts"] >= 0 <= event["dur"]
            assert event["args"].keys() >= {"epoch", "step", "start"}
        else:
            assert event["name"] in {"process_name", "thread_name", "thread_sort_index"}
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(named.values()) == ["rank 0"]
    assert named.keys() == {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert {e["args"]["rows"] for e in events if e["name"] == "forward"} == {32}


def test_without_a_timeline_the_trace_says_what_to_set(manifest: ShardManifest, tmp_path: Path) -> None:
    summary = TrainingSummary.of(train_here(_config(manifest, tmp_path / "run")))
    with pytest.raises(ValueError, match="has no timeline; set timelineEverySteps"):
        summary.timeline(str(tmp_path / "trace.json"))
