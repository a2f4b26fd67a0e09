"""A `keras.Model` in a module that workers can import."""

from typing import Any

from ringspark.extras.keras_models.library import import_keras

keras = import_keras()


@keras.saving.register_keras_serializable("user")
class KerasLine(keras.Model):
    def __init__(self, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.width, self.dense = width, keras.layers.Dense(1)
        self.build((None, width))

    def build(self, input_shape: Any) -> None:
        self.dense.build(input_shape)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def get_config(self) -> dict[str, Any]:
        return {"width": self.width}
