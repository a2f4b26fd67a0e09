"""Shows a training on the driver while it runs, from the files of the run directory.

The driver is blocked in a Spark job meanwhile and may have no connection to the ranks, so this code reads
the files that rank 0 writes to the store.
"""

from __future__ import annotations

import threading

from tqdm.auto import tqdm

from ringspark.estimators.training.history import read_history, read_progress

POLL_SECONDS = 0.5


class ProgressWatcher:
    """A context manager that shows one bar over all steps and one line per finished epoch."""

    def __init__(self, run_uri: str, enabled: bool) -> None:
        self._run_uri = run_uri
        self._enabled = enabled
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ringspark-progress", daemon=True)

    def __enter__(self) -> ProgressWatcher:
        if self._enabled:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._enabled:
            self._thread.join()

    def _watch(self) -> None:
        shown_epochs = 0
        bar = None
        while True:
            # It reads once more after the stop, so that the last epoch is shown too.
            last = self._stop.wait(POLL_SECONDS)
            try:
                progress, history = read_progress(self._run_uri), read_history(self._run_uri)
            except (OSError, ValueError):
                # The store may fail for a moment, and showing progress must not end a training.
                progress, history = None, []
            if progress is not None:
                bar = bar or tqdm(total=progress.num_steps, unit="step", desc="training", disable=None)
                done = sum(record.steps for record in history) if last else progress.step
                bar.update(max(done, progress.step) - bar.n)
                rate = progress.rows / progress.seconds if progress.seconds else 0.0
                bar.set_postfix_str(f"epoch {progress.epoch}/{progress.epochs}, {rate:,.0f} rows/s")
            for record in history[shown_epochs:]:
                shown_epochs += 1
                validation = (
                    f", validation loss {record.validation_loss:.4f}"
                    if record.validation_loss is not None
                    else ""
                )
                tqdm.write(
                    f"epoch {record.epoch}: loss {record.train_loss:.4f}{validation}, {record.seconds:.1f} s"
                )
            if last:
                break
        if bar is not None:
            bar.close()
