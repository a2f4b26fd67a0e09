"""Imports Keras with the torch backend, also in a process whose environment names another backend."""

from __future__ import annotations

import os
import sys
from typing import Any


def import_keras() -> Any:
    """Returns the module `keras`; raises ValueError if it is missing, too old or has another backend."""
    if "keras" not in sys.modules:
        before = os.environ.get("KERAS_BACKEND")
        os.environ["KERAS_BACKEND"] = "torch"
        try:
            import keras
        except ImportError:
            raise ValueError(
                "the network needs Keras 3, which is not installed here; pip install 'ringspark[keras]'"
            ) from None
        finally:
            # A child process may want another backend.
            if before is None:
                del os.environ["KERAS_BACKEND"]
            else:
                os.environ["KERAS_BACKEND"] = before
    import keras

    if int(keras.__version__.split(".")[0]) < 3:
        raise ValueError(f"the network needs Keras 3, got Keras {keras.__version__}; pip install 'keras>=3'")
    backend = keras.backend.backend()
    if backend != "torch":
        raise ValueError(
            f"a Keras model needs the torch backend, but this process has imported Keras with the {backend} "
            "backend; set the environment variable KERAS_BACKEND=torch before keras is imported"
        )
    return keras
