"""`KerasNetwork`: train mode, state, the rebuild from JSON, and the models that are refused."""

import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_program
from small_training import bare_config
from torch import nn

from ringspark.estimators import TorchClassifier, TorchRegressor, plan_memory
from ringspark.estimators.training.check.schema import check_network
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.extras.keras_models import KerasNetwork
from ringspark.extras.keras_models.library import import_keras
from ringspark.models import ModelSpec
from ringspark.models.adapters import adapt_network
from ringspark.models.layers import build_network, describe_network
from ringspark.models.meta_device import build_on_meta, copy_to_meta, fill

keras = import_keras()
layers = keras.layers


@keras.saving.register_keras_serializable("tests")
class Noise(layers.Layer):
    def call(self, x: Any, training: bool | None = None) -> Any:
        return x + keras.random.normal(x.shape) if training else x


@keras.saving.register_keras_serializable("tests")
class Forgets(layers.Layer):
    def __init__(self, factor: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x: Any) -> Any:
        return x * self.factor

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name}


@keras.saving.register_keras_serializable("tests")
class AddsLoss(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(x.sum())
        return x


@keras.saving.register_keras_serializable("tests")
class TwoColumns(keras.Model):
    """A subclass, whose inner layers get names that depend on the models built before."""

    def __init__(self, width: int = 3, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.width = width
        self.first, self.second = layers.Dense(width), layers.Dense(width)
        self.norm = layers.BatchNormalization()

    def build(self, x_shape: Any, y_shape: Any) -> None:
        self.first.build(x_shape)
        self.second.build(y_shape)
        self.norm.build((None, self.width))

    def call(self, x: Any, y: Any) -> Any:
        return self.norm(self.first(x) - self.second(y))

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, "width": self.width}


class Unregistered(layers.Layer):
    def call(self, x: Any) -> Any:
        return x


def of(*parts: Any, features: int = 4) -> Any:
    return keras.Sequential([keras.Input((features,)), *parts])


def everything() -> Any:
    dropouts = layers.Dropout(0.5), layers.Dropout(0.5, seed=3)
    hidden = layers.Dense(8, activation="relu"), layers.BatchNormalization(), *dropouts, Noise()
    model = of(layers.Normalization(), *hidden, layers.Dense(3))
    model.layers[0].adapt(torch.randn(100, 4) * 3 + 1)
    return model


def subclass() -> Any:
    model = TwoColumns(5)
    model(torch.randn(2, 4), torch.randn(2, 4))
    return model


def lookup() -> Any:
    numbers, words = keras.Input((2,)), keras.Input((1,), dtype="int32")
    vectors = layers.Flatten()(layers.Embedding(7, 3)(words))
    joined = layers.Concatenate()([numbers, vectors])
    return keras.Model([numbers, words], [layers.Dense(1)(joined), layers.Dense(2)(joined)])


def sequences() -> Any:
    rows = keras.Input((5, 4))
    encoded = layers.MultiHeadAttention(2, 3)(rows, layers.Masking()(rows))
    return keras.Model(rows, layers.Dense(1)(layers.Bidirectional(layers.LSTM(3))(encoded)))


MODELS: dict[str, tuple[Callable[[], Any], tuple[torch.Tensor, ...]]] = {
    "everything": (everything, (torch.randn(6, 4),)),
    "subclass": (subclass, (torch.randn(6, 4), torch.randn(6, 4))),
    "lookup": (lookup, (torch.randn(6, 2), torch.tensor([0, 1, 2, 3, 4, 6]))),
    "sequences": (sequences, (torch.randn(6, 5, 4),)),
}


def same(one: Any, other: Any) -> bool:
    pairs = zip(*(v if isinstance(v, list) else [v] for v in (one, other)), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_a_network_predicts_as_the_keras_model_it_came_from_and_turns_into(name: str) -> None:
    make, inputs = MODELS[name]
    model = make()
    network = adapt_network(model).eval()
    arguments = (list(inputs),) if name == "lookup" else inputs
    with torch.no_grad():
        expected = model(*arguments, training=False)
        assert same(network(*inputs), expected)
        assert same(network.to_keras()(*arguments, training=False), expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_network_is_built_from_json_and_its_state_dict(name: str) -> None:
    make, inputs = MODELS[name]
    network = adapt_network(make()).eval()
    text = json.dumps(describe_network(network))
    empty = build_on_meta(lambda: build_network(json.loads(text)))
    assert all(parameter.is_meta for parameter in empty.parameters())
    for other in (empty, copy_to_meta(network)):
        fill(other, {key: value.clone() for key, value in network.state_dict().items()})
        with torch.no_grad():
            assert same(other.eval()(*inputs), network(*inputs))


@pytest.mark.slow
def test_another_process_builds_it_although_its_environment_names_another_backend(tmp_path: Path) -> None:
    adapt_network(everything())  # the next model gets other names than the first of a process
    network = adapt_network(everything()).eval()
    rows = torch.randn(3, 4)
    torch.save({"state": network.state_dict(), "rows": rows}, tmp_path / "state.pt")
    (tmp_path / "network.json").write_text(json.dumps(describe_network(network)))
    code = """
import json, os, sys, torch
from ringspark.models.layers import build_network
from ringspark.extras.keras_models.library import import_keras
keras = import_keras()
assert os.environ["KERAS_BACKEND"] == "jax"
@keras.saving.register_keras_serializable("tests")
class Noise(keras.layers.Layer):
    def call(self, x, training=None):
        return x
network = build_network(json.load(open("network.json"))).eval()
saved = torch.load("state.pt")
network.load_state_dict(saved["state"])
print(json.dumps(network(saved["rows"]).tolist()))
"""
    with torch.no_grad():
        assert json.loads(_output_with_jax(code, tmp_path)) == network(rows).tolist()


def _output_with_jax(code: str, folder: Path) -> str:
    """Runs code in a process whose environment names the backend jax."""
    return run_program(code, cwd=folder, env={"PATH": "/usr/bin:/bin", "KERAS_BACKEND": "jax"}).stdout


def test_train_and_eval_reach_dropout_and_batch_norm() -> None:
    model = everything()
    network, rows = adapt_network(model), torch.randn(64, 4)
    start = {key: value.clone() for key, value in network.state_dict().items()}
    network.eval()
    assert same(network(rows), network(rows))
    assert all(torch.equal(value, start[key]) for key, value in network.state_dict().items())
    network.train()
    assert not same(network(rows), network(rows))
    moved = {key for key, value in network.state_dict().items() if not torch.equal(value, start[key])}
    assert {name.rpartition("/")[2] for name in moved} == {"moving_mean", "moving_variance"}
    assert moved <= {name for name, _ in network.named_buffers()}


def test_moving_statistics_are_those_of_keras() -> None:
    model = of(layers.BatchNormalization(momentum=0.7))
    network, rows = adapt_network(model).train(), torch.randn(32, 4) + 2
    network(rows), model(rows, training=True)
    found, expected = ([v.value for v in m.weights] for m in (network.to_keras(), model))
    assert same(found, expected)


@pytest.mark.parametrize("random_layer", [layers.Dropout(0.5, seed=1), layers.Dropout(0.5), Noise()])
def test_random_layers_draw_from_generators_that_a_checkpoint_holds(random_layer: Any) -> None:
    network, rows = adapt_network(of(random_layer)).train(), torch.ones(8, 4)

    def draw() -> list[torch.Tensor]:
        torch.manual_seed(0)
        random.seed(0)
        return [network(rows), network(rows)]

    first, second = draw()
    assert not torch.equal(first, second)
    assert same(draw(), [first, second])


def test_frozen_layers_stay_frozen_parameters() -> None:
    base = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.BatchNormalization()], name="base")
    base.trainable = False
    network = adapt_network(of(base, layers.Dense(1))).train()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    network(torch.randn(8, 4)).sum().backward()
    frozen = {name for name, parameter in network.named_parameters() if parameter.grad is None}
    assert {name.rpartition("/")[2] for name in frozen} == {"kernel", "bias", "gamma", "beta"}
    assert len(list(network.named_buffers())) == 2
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


def test_a_regularizer_of_a_frozen_layer_is_no_loss() -> None:
    dense = layers.Dense(3, kernel_regularizer="l2")
    dense.trainable = False
    adapt_network(of(dense, layers.Dense(1)))


def stateful() -> Any:
    return keras.Sequential([keras.Input((3, 4), batch_size=2), layers.LSTM(1, stateful=True)])


def named_inputs() -> Any:
    b, a = keras.Input((1,), name="b"), keras.Input((1,), name="a")
    return keras.Model({"b": b, "a": a}, layers.Dense(1)(layers.Concatenate()([b, a])))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "unbuilt": (lambda: keras.Sequential([layers.Dense(1)]), "is not built"),
    "a layer": (lambda: layers.Dense(1), "is the Keras object Dense; give a keras.Model"),
    "regularizer": (lambda: of(layers.Dense(1, kernel_regularizer="l2")), "set weightDecay"),
    "activity": (lambda: of(layers.Dense(1, activity_regularizer="l2")), "activity_regularizer"),
    "constraint": (lambda: of(layers.Dense(1, kernel_constraint="max_norm")), "has a constraint"),
    "stateful": (stateful, "set stateful=False"),
    "lambda": (lambda: of(layers.Lambda(lambda x: 2 * x)), "uses a lambda"),
    "activation": (lambda: of(layers.Dense(1, activation=same)), "uses same, which Keras has not registered"),
    "unregistered": (lambda: of(Unregistered()), "uses Unregistered"),
    "forgetful": (lambda: of(Forgets(3.0)), "computes something else after it is rebuilt"),
    "names": (named_inputs, "columns go by position"),
    "torch inside": (lambda: of(layers.TorchModuleWrapper(nn.Linear(4, 1))), "cannot be rebuilt"),
    "inside torch": (lambda: nn.Sequential(of(layers.Dense(1))), "ignores train() and eval()"),
    "a layer's loss": (lambda: of(AddsLoss(), layers.Dense(1)), "calls add_loss()"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_would_train_otherwise_than_in_keras_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        TorchRegressor(model=make())
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_wrong_inputs_give_one_line() -> None:
    with pytest.raises(ValueError, match="expected axis -1 of input shape to have value 4") as caught:
        adapt_network(of(layers.Dense(1)))(torch.ones(2, 3))
    assert len(str(caught.value).splitlines()) == 1


def test_compile_of_keras_has_no_effect_and_says_so() -> None:
    model = of(layers.Dense(1))
    model.compile("adam", "mse")
    with pytest.warns(UserWarning, match=r"compile\(\) of Keras model .* has no effect"):
        network = adapt_network(model)
    assert "compile_config" not in network.config


@pytest.mark.parametrize("nested", [False, True])
def test_each_output_is_checked_with_its_own_loss(nested: bool) -> None:
    x = keras.Input((4,))
    model = keras.Model(x, [layers.Dense(2, activation=name)(x) for name in ("sigmoid", "softmax")])
    if nested:
        model = keras.Model(x, model(x))
    network = adapt_network(model)
    network.check_settings("any", ("mse", "mse"))
    network.check_settings("any", ("cross_entropy", "mse"))
    with pytest.raises(ValueError, match="ends with softmax, but loss 'cross_entropy' takes logits"):
        network.check_settings("any", ("mse", "cross_entropy"))


REFUSAL = pytest.raises(ValueError, match="give the last layer no activation")


@pytest.mark.parametrize(
    ("activation", "task", "loss", "result"),
    [
        ("softmax", "classification", "auto", REFUSAL),
        ("sigmoid", "classification", "auto", REFUSAL),
        ("softmax", "any", "cross_entropy", REFUSAL),
        ("sigmoid", "any", "mse", nullcontext()),
        ("sigmoid", "regression", "auto", nullcontext()),
        ("relu", "classification", "auto", nullcontext()),
    ],
)
def test_a_loss_of_logits_gets_none_after_softmax(activation: str, task: Any, loss: str, result: Any) -> None:
    config = bare_config(task=task, losses=(loss,))
    for last in ([layers.Dense(2, activation=activation)], [layers.Dense(2), layers.Activation(activation)]):
        with result:
            check_network(config, UserObjects(), copy_to_meta(adapt_network(of(*last))))


def test_a_model_of_another_backend_is_refused_with_the_remedy(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    code = """
import keras
from ringspark.estimators import TorchRegressor
try:
    TorchRegressor(model=keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
except ValueError as error:
    print(error)
"""
    message = "imported Keras with the jax backend; set the environment variable KERAS_BACKEND=torch"
    assert message in _output_with_jax(code, tmp_path)


def test_a_spec_an_estimator_and_a_plan_take_keras_models_too() -> None:
    spec = ModelSpec("keras_of_a_user:KerasLine", {"width": 3})
    assert isinstance(spec.build(), KerasNetwork)
    assert all(parameter.is_meta for parameter in build_on_meta(spec.build).parameters())
    hidden = layers.Normalization(), layers.Dense(8, activation="relu"), layers.Dropout(0.5)
    model = of(*hidden, layers.Dense(1))
    assert isinstance(TorchClassifier(model=model).getModel(), KerasNetwork)
    twin = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
    batch = (((64, 4), "float32"), ((64,), "float32"))
    plans = [plan_memory(network, batch) for network in (model, twin)]
    assert plans[0].peak >= plans[1].peak
