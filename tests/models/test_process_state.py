"""Concurrent threads that build and save networks do not disturb process state or output."""

import logging
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from ringspark.models.meta_device import fill
from ringspark.models.process_state import fork_generators, ignore_warnings, silence_thread


def test_only_the_thread_that_asks_for_quiet_is_silent(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def speak(name: str) -> None:
        print(name, file=sys.stderr)
        logging.getLogger("torch.some").warning(name)
        warnings.warn(name, UserWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as warned, silence_thread(), ThreadPoolExecutor(1) as pool:
        warnings.simplefilter("always")  # inserted before the filter of the silenced thread
        with ignore_warnings():
            speak("quiet")
            pool.submit(speak, "heard").result()
            logging.getLogger("torch.some").error("an error")
    logging.getLogger("torch.some").warning("later")
    assert capsys.readouterr().err.splitlines()[0] == "heard"
    assert [record.message for record in caplog.records] == ["heard", "an error", "later"]
    assert [str(warning.message) for warning in warned] == ["heard"]


def overlap(work: Callable[[int, Callable[[], None]], Any]) -> list[Any]:
    """Runs two threads; the second starts while the first one runs.

    The second waits in its middle until the first has ended. If a lock serializes the threads, each waits
    half a second in vain.
    """
    in_first, in_second, after_first = (threading.Event() for _ in range(3))

    def first() -> Any:
        found = work(1, lambda: (in_first.set(), in_second.wait(0.5)))  # type: ignore[func-returns-value]
        after_first.set()
        return found

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(first)]
        in_first.wait()
        futures.append(
            pool.submit(work, 2, lambda: (in_second.set(), after_first.wait(0.5)))  # type: ignore[arg-type]
        )
        return [future.result() for future in futures]


def test_two_threads_that_draw_random_numbers_do_not_meet() -> None:
    before = torch.get_rng_state()

    def work(seed: int, between: Callable[[], None]) -> float:
        with fork_generators():
            torch.manual_seed(seed)
            between()
            return torch.rand(1).item()

    found = overlap(work)
    assert torch.equal(torch.get_rng_state(), before)
    assert found == [work(seed, lambda: None) for seed in (1, 2)]


class Waiting(nn.Module):
    """Calls a given function in the middle of `load_state_dict`."""

    def __init__(self, between: Callable[[], None]) -> None:
        super().__init__()
        self.between = between

    def _load_from_state_dict(self, *args: Any) -> None:
        self.between()


def test_two_threads_that_fill_modules_leave_torchs_setting_as_it_was() -> None:
    overlap(lambda number, between: fill(Waiting(between), {}))
    assert not torch.__future__.get_swap_module_params_on_conversion()
