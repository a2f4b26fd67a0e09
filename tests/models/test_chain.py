"""Networks as sequences of links, from which pipelines are built."""

import copy

import pytest
import torch
from registries import models_of
from torch import nn

from ringspark.models import MODELS, ModelSpec
from ringspark.models.chain import Link, belongs_to, links_of, run_links
from tests.models.test_contract import EXAMPLES, example_inputs

CHAINS = ("mlp", "recurrent", "resnet", "tabm", "tabular", "transformer_classifier", "transformer_lm")


@pytest.mark.parametrize("name", models_of(CHAINS))
def test_the_links_compute_what_forward_computes(name: str) -> None:
    net = ModelSpec(name, EXAMPLES[name]).build().eval()
    links, inputs = links_of(net), example_inputs(name, 6)
    assert len(links) > 2
    assert len({link.name for link in links}) == len(links)
    assert torch.equal(run_links(links, inputs), net(*inputs))


@pytest.mark.parametrize("name", models_of(CHAINS))
def test_every_link_computes_with_its_parts_alone(name: str) -> None:
    """A stage holds only the parameters of its links; here all other parameters are NaN."""
    net = ModelSpec(name, EXAMPLES[name]).build().eval()
    values = example_inputs(name, 6)
    for index in range(len(links_of(net))):
        lone = copy.deepcopy(net)
        link = links_of(lone)[index]
        with torch.no_grad():
            for key, parameter in lone.named_parameters():
                if not any(belongs_to(key, part) for part in link.parts):
                    parameter.fill_(float("nan"))
        result = link.run(*values)
        values = result if isinstance(result, tuple) else (result,)
        assert all(not value.isnan().any() for value in values if value is not None)


@pytest.mark.extras
def test_the_networks_without_links_are_refused_with_what_to_do() -> None:
    for name in set(MODELS) - set(CHAINS):
        with pytest.raises(ValueError, match=r"has no method links\(\); add it"):
            links_of(ModelSpec(name, EXAMPLES[name]).build())


def test_the_items_of_a_sequential_are_links_and_so_are_those_of_sequentials_in_it() -> None:
    inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    net = nn.Sequential(nn.Linear(2, 3), inner, nn.Linear(4, 1))
    assert [link.name for link in links_of(net)] == ["0", "1.0", "1.1", "2"]
    x = torch.randn(5, 2)
    assert torch.equal(run_links(links_of(net), (x,)), net(x))
    # A hook changes the output, so the inner Sequential cannot be split.
    inner.register_forward_hook(lambda module, inputs, output: output + 1)
    assert [link.name for link in links_of(net)] == ["0", "1", "2"]
    assert torch.equal(run_links(links_of(net), (x,)), net(x))


class _Odd(nn.Module):
    def __init__(self, links: list[object]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 1)
        self._links = links

    def links(self) -> list[object]:
        return self._links


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ([], "returns no link"),
        (["first"], "must return ringspark.models.chain.Link, got a str"),
        ([Link("a", abs, ("third",))], "names a part 'third', which the network does not have"),
        ([Link("a", abs, ("first",))], "omit second.weight, second.bias; name every"),
    ],
)
def test_links_that_are_wrong_are_refused(links: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        links_of(_Odd(links))


def test_values_between_links_are_tensors() -> None:
    links = [Link("a", lambda x: (x, 3), ()), Link("b", lambda x, n: x * n, ())]
    with pytest.raises(ValueError, match=r"link 'b' must get a tensor, .* got a int"):
        run_links(links, (torch.ones(1),))
