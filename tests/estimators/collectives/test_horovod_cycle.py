"""Horovod's cycle time; only a build that the setup script patched can set it at each start."""

import os

import pytest
from programs import run_program

from ringspark.estimators.collectives.horovod_collective import _cycle

NAME = "HOROVOD_CYCLE_TIME"
START_TWICE = """
import horovod.torch as hvd
for _ in range(2):
    hvd.init()
    hvd.shutdown()
print("started twice")
"""


def test_both_settings_survive_a_second_start_in_one_process():
    pytest.importorskip("horovod.torch")
    names = [f"HOROVOD_{part}_{what}" for part in ("LOCAL", "CROSS") for what in ("RANK", "SIZE")]
    place = {name: str(int(name.endswith("SIZE"))) for name in names}
    settings = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", NAME: "5", "HOROVOD_FUSION_THRESHOLD": "0"}
    assert run_program(START_TWICE, env=os.environ | place | settings).stdout == "started twice\n"


def test_horovod_looks_for_work_seldom_only_where_sums_go_without_it(monkeypatch):
    pytest.importorskip("horovod")
    monkeypatch.delenv(NAME, raising=False)
    assert _cycle(is_rare=True) == {NAME: "30"}
    assert _cycle(is_rare=False) == {NAME: "1"}
    monkeypatch.setenv(NAME, "3")
    assert _cycle(is_rare=True) == {NAME: "3"}


def test_a_cycle_time_that_horovod_tunes_is_left_to_it(monkeypatch):
    pytest.importorskip("horovod")
    monkeypatch.delenv(NAME, raising=False)
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    assert _cycle(is_rare=True) == {NAME: None}


def test_a_build_that_would_end_the_process_gets_no_cycle_time(monkeypatch, caplog):
    horovod = pytest.importorskip("horovod")
    monkeypatch.setattr(horovod, "__version__", "0.28.1+iface")
    monkeypatch.setenv(NAME, "3")
    assert _cycle(is_rare=True) == {NAME: None}
    assert "HOROVOD_CYCLE_TIME=3 is not used: Horovod 0.28.1+iface cannot set it twice" in caplog.text
