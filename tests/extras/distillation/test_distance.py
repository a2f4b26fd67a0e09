"""The distance from a teacher equals formulas written out, and its gradient is zero at the teacher."""

from typing import Any

import pytest
import torch
from small_training import bare_config

from ringspark.estimators.training.settings.config import UserObjects
from ringspark.extras.distillation.distance import class_distance, distil, label_distance, squared_distance
from ringspark.extras.distillation.teacher import check_teacher
from ringspark.pipelines import ShardManifest

ROWS = 6


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1), (ROWS, 4)])
def test_a_teacher_that_equals_the_network_gives_a_gradient_of_0(shape: tuple[int, ...]) -> None:
    outputs = _draw(*shape).requires_grad_()
    distance = class_distance(outputs, outputs.detach(), 3.0) + squared_distance(outputs, outputs.detach())
    distance.sum().backward()
    torch.testing.assert_close(distance.detach(), torch.zeros(ROWS))
    torch.testing.assert_close(outputs.grad, torch.zeros(shape))


def test_the_gradient_is_t_times_the_difference_of_softened_probabilities() -> None:
    outputs, teacher, t = _draw(ROWS, 4).requires_grad_(), _draw(ROWS, 4, seed=1), 3.0
    class_distance(outputs, teacher, t).sum().backward()
    expected = t * ((outputs / t).softmax(1) - (teacher / t).softmax(1))
    torch.testing.assert_close(outputs.grad, expected.detach())


def test_one_logit_is_a_choice_of_two_classes() -> None:
    outputs, teacher = _draw(ROWS, 1), _draw(ROWS, seed=1)
    both = [torch.stack([torch.zeros(ROWS), z.reshape(-1)], 1) for z in (outputs, teacher)]
    torch.testing.assert_close(class_distance(outputs, teacher, 2.0), class_distance(*both, 2.0))


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1), (ROWS, 4), (ROWS, 3, 4)])
def test_independent_labels_have_the_gradient_of_a_binary_cross_entropy(shape: tuple[int, ...]) -> None:
    """A softmax over the labels would not see a shift of all logits."""
    outputs, teacher, t = _draw(*shape).requires_grad_(), _draw(ROWS, shape[-1], seed=1), 3.0
    teacher = teacher if len(shape) > 1 else teacher[:, 0]
    label_distance(outputs, teacher, t).sum().backward()
    theirs = teacher.unsqueeze(1) if len(shape) == 3 else teacher
    expected = t * ((outputs / t).sigmoid() - (theirs / t).sigmoid()) / outputs[0].numel()
    torch.testing.assert_close(outputs.grad, expected.detach())
    config = bare_config(losses=("bce_with_logits",), alpha=1.0, temperature=t)
    found = distil(config, torch.zeros(ROWS, 1), outputs, teacher, None)[:, 0]
    torch.testing.assert_close(found, label_distance(outputs, teacher, t))


@pytest.mark.parametrize("is_classes", [True, False])
def test_an_ensemble_has_the_mean_of_its_members(is_classes: bool) -> None:
    def distance(outputs: torch.Tensor) -> torch.Tensor:
        return class_distance(outputs, teacher, 2.0) if is_classes else squared_distance(outputs, teacher)

    outputs, teacher = _draw(ROWS, 3, 2), _draw(ROWS, 2, seed=1)
    expected = torch.stack([distance(member) for member in outputs.unbind(1)]).mean(0)
    torch.testing.assert_close(distance(outputs), expected)


@pytest.mark.parametrize(
    ("ours", "theirs"), [((ROWS,), (ROWS, 1)), ((ROWS, 1), (ROWS,)), ((ROWS, 2), (ROWS, 2))]
)
def test_values_of_one_column_have_either_shape(ours: Any, theirs: Any) -> None:
    outputs, teacher = _draw(*ours), _draw(*theirs, seed=1)
    expected = (outputs.reshape(ROWS, -1) - teacher.reshape(ROWS, -1)).square().mean(1)
    torch.testing.assert_close(squared_distance(outputs, teacher), expected)


@pytest.mark.parametrize(
    ("task", "loss", "is_classes"),
    [
        ("classification", "cross_entropy_per_member", True),
        ("any", "cross_entropy", True),
        ("any", "function", False),
        ("regression", "mse", False),
    ],
)
def test_alpha_weighs_the_distance_and_the_loss_of_the_label(task: Any, loss: str, is_classes: bool) -> None:
    config = bare_config(task=task, losses=(loss,), alpha=0.75, temperature=2.5)
    outputs, teacher, rows = _draw(ROWS, 3), _draw(ROWS, 3, seed=1), _draw(ROWS, 1, seed=2)
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0, 1.0])[:, None]  # an ignored row, a class weight
    distance = class_distance(outputs, teacher, 2.5) if is_classes else squared_distance(outputs, teacher)
    found = distil(config, rows, outputs, teacher, weights)
    torch.testing.assert_close(found, 0.75 * distance[:, None] * weights + 0.25 * rows)


def test_a_training_step_of_its_own_is_refused() -> None:
    config = bare_config(soft_label_column="__teacher", training_step="own")
    with pytest.raises(ValueError, match="trainingStep computes its own losses; let trainingStep call"):
        check_teacher(config, UserObjects(), ShardManifest.load, (2, 3))
