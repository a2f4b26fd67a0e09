import threading
import time
from collections.abc import Generator, Iterator

import pytest
from waiting import wait_for

from ringspark.pipelines.readers.prefetch import prefetch, prefetch_bundles

pytestmark = pytest.mark.usefixtures("no_thread_left")


def test_items_keep_their_order() -> None:
    assert list(prefetch(iter(range(1000)), 2)) == list(range(1000))


def test_at_most_depth_items_wait() -> None:
    made: list[int] = []

    def source() -> Iterator[int]:
        for item in range(100):
            made.append(item)
            yield item

    items = prefetch(source(), 3)
    assert next(items) == 0
    time.sleep(0.2)
    # One item is used, three wait, and the thread holds one.
    assert len(made) <= 5
    items.close()


def test_an_error_surfaces_after_the_items_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise RuntimeError("file x is broken")

    items = prefetch(source(), 1)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(RuntimeError, match="file x is broken"):
        next(items)


def test_closing_early_closes_the_source_in_its_own_thread() -> None:
    closed_in: list[threading.Thread] = []

    def source() -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            closed_in.append(threading.current_thread())

    items = prefetch(source(), 1)
    next(items)
    items.close()
    assert [thread.name for thread in closed_in] == ["ringspark-prefetch"]


def test_nothing_runs_before_the_first_item_is_asked_for() -> None:
    before = threading.active_count()
    items = prefetch(iter([1]), 1)
    assert threading.active_count() == before
    assert list(items) == [1]


def test_a_bundle_ends_at_its_size_or_at_an_error_and_closing_it_closes_the_source() -> None:
    made: list[int] = []
    ended = threading.Event()

    def source(stop: int) -> Generator[int, None, None]:
        try:
            for item in range(stop):
                made.append(item)
                yield item
            raise RuntimeError("file x is broken")
        finally:
            ended.set()

    items = prefetch_bundles(source(8), 1, lambda item: 1, 3)
    assert [next(items) for _ in range(8)] == list(range(8))
    with pytest.raises(RuntimeError, match="file x is broken"):
        next(items)
    made.clear()
    ended.clear()
    items = prefetch_bundles(source(100), 1, lambda item: 1, 3)
    assert next(items) == 0
    # One bundle is used, one waits, and the thread holds one.
    wait_for("the third bundle", lambda: len(made) >= 9)
    time.sleep(0.2)
    assert made == list(range(9))
    items.close()
    assert ended.is_set()
