"""User-defined networks; a test copies this file elsewhere and removes the copy."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.out = nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(image))
        return self.out((hidden + F.relu(self.second(hidden))).mean((2, 3)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8), nn.Parameter(torch.randn(1, 5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layers, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 2)

    def forward(self, ids: torch.Tensor, is_there: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.words(ids) + self.places, src_key_padding_mask=is_there == 0)
        return self.out(hidden.mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(3, 6, num_layers=2, batch_first=True), nn.Linear(6, 1)

    def forward(self, steps: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(steps)
        return self.out(hidden[:, -1]).squeeze(-1)


class Table(nn.Module):
    """Ids and numbers, with dropout and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.ids, self.norm = nn.Embedding(20, 4), nn.BatchNorm1d(7)
        self.body = nn.Sequential(nn.Linear(7, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 2))

    def forward(self, key: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return self.body(self.norm(torch.cat([self.ids(key), numbers], 1)))


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.many = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 6)

    def forward(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.body(numbers))
        return self.one(hidden).squeeze(-1), self.many(hidden).reshape(-1, 2, 3)


class Functional(nn.Module):
    """No layers: parameters, a non-persistent buffer, a plain tensor, arithmetic on sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4))
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]), persistent=False)
        self.shift = torch.tensor([0.5, -0.5])

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        rows = numbers.shape[0]
        scores = F.linear(numbers * self.scale, self.weight) + self.shift
        place = torch.arange(rows, device=numbers.device)[:, None] * 0
        return scores.masked_fill(scores > 9, float("-inf")).view(rows, 2) + place


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self._inner, numbers, use_reentrant=False))

    def _inner(self, numbers: torch.Tensor) -> torch.Tensor:
        return F.silu(self.first(numbers))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.double()

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.second(torch.sigmoid(self.first(numbers.double())))


class Branches(nn.Module):
    """Has data-dependent control flow, which a program cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 2)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.line(numbers) if numbers.sum() > 0 else -self.line(numbers)


class Bags(nn.Module):
    """Concatenated rows of varying length."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.EmbeddingBag(20, 4, mode="mean"), nn.Linear(4, 2)

    def forward(self, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(values, offsets))


class Texts(nn.Module):
    """Batches padded to their longest row, with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.out = nn.Embedding(20, 4), nn.Embedding(32, 4), nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.out((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class Writes(nn.Module):
    """Writes into its input, its intermediate results, views of them, and uninitialised memory."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.out = nn.Linear(4, 2)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        image.mul_(2)
        hidden = self.body(image).mean((2, 3))
        hidden[:, 1:3] += hidden[:, :1]
        hidden[hidden > 1] *= 2
        return self.out(hidden) + torch.empty(2, device=image.device).fill_(1)
