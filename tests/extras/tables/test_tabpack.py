"""TabPack: rates of the members, their best weights, and their shares in the prediction."""

import pytest
import torch

from ringspark.extras.tables.tabpack import TabPack, choose_greedily, squared_error

EDGES = [[-1.0, 0.0, 1.0]]


def pack(**options: object) -> TabPack:
    torch.manual_seed(0)
    given = {"edges": EDGES, "cardinalities": [3], "out_features": 1, "width": 4, "dropouts": [0.0, 0.0]}
    return TabPack(**{**given, "rates": [1.0, 0.25], **options})


def inputs(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(-1, 1, rows)[:, None], torch.arange(rows)[:, None] % 3


def test_a_step_of_adam_moves_each_member_by_its_rate() -> None:
    net = pack(unknown=0.0).train()
    before = net.head.get("weight").detach().clone()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, eps=1e-15)
    net(*inputs()).square().sum().backward()
    optimizer.step()
    moved = (net.head.get("weight") - before).abs().amax((1, 2))
    torch.testing.assert_close(moved, torch.tensor([0.1, 0.025]))


def test_each_member_predicts_by_its_best_weights() -> None:
    net = pack().eval()
    first = net.candidates(*inputs())
    net.choose_members(torch.eye(4, dtype=torch.float64))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    kept, present = net.candidates(*inputs()).chunk(2)
    assert torch.equal(kept, first[:2])
    assert not torch.equal(present, kept)
    # Only the second member's present weights are better than its best ones.
    net.choose_members(torch.diag(torch.tensor([1.0, 4.0, 2.0, 3.0], dtype=torch.float64)))
    better = net.candidates(*inputs())[:2]
    assert torch.equal(better[0], kept[0])
    assert torch.equal(better[1], present[1])
    expected = torch.einsum("kbo,k->bo", better, net.shares)
    torch.testing.assert_close(net(*inputs()), expected)


def test_bf16_does_not_round_the_offset() -> None:
    network, offset = pack(out_features=1).eval(), torch.full((8,), 1001.3)
    expected = network(*inputs(), offset)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(network(*inputs(), offset), expected, rtol=0, atol=0.05)


def test_members_whose_errors_cancel_share_the_prediction() -> None:
    errors = torch.tensor([[1.0, -1.0, 1.0], [-1.0, 1.0, -1.0], [3.0, 3.0, 3.0]], dtype=torch.float64)
    assert choose_greedily(squared_error(errors @ errors.T), errors).tolist() == [0.5, 0.5, 0.0]
    one_perfect = torch.diag(torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert choose_greedily(squared_error(one_perfect), one_perfect).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rates": [1.0]}, "one number per member"),
        ({"rates": [1.0, 0.0]}, "must be above 0"),
        ({"dropouts": [0.0, 1.0]}, "dropouts"),
        ({"edges": [], "cardinalities": []}, "a number or a category"),
        ({"averages": "logits"}, "averages must be"),
        ({"edges": [[1.0, 0.0]]}, "ascending"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(**options)
