"""All clients of a simulated round at once: a small network whose weights have one more dimension, the client.

A client starts from the common model, takes a few steps on batches of its own data, and sends how far it came, divided
by the learning rate: with one step that is its gradient. Honest clients average that over rounds (worker momentum).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.byzantine.attacks.data import BackdoorTrigger, LabelFlip
from holdfast.byzantine.federation.data import Images


class Network:
    """Pixels, one hidden layer, classes: the model of all clients as one vector."""

    def __init__(self, pixels: int, hidden: int, classes: int) -> None:
        self._shapes = ((pixels, hidden), (1, hidden), (hidden, classes), (1, classes))
        self.size = sum(rows * columns for rows, columns in self._shapes)

    def initial(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        made = [
            torch.randn(shape, generator=generator) * (2.0 / shape[0]) ** 0.5 if shape[0] > 1 else torch.zeros(shape)
            for shape in self._shapes
        ]
        return torch.cat([one.reshape(-1) for one in made])

    def _parts(self, weights: torch.Tensor) -> list[torch.Tensor]:
        sizes = [rows * columns for rows, columns in self._shapes]
        pieces = torch.split(weights, sizes, dim=-1)
        return [one.view(*weights.shape[:-1], *shape) for one, shape in zip(pieces, self._shapes, strict=True)]

    def predicted(self, weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        first, first_bias, second, second_bias = self._parts(weights)
        return (torch.relu(x @ first + first_bias) @ second + second_bias).argmax(dim=-1)

    def gradients(self, weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Of the cross entropy: (clients, numbers) from weights (clients, numbers), x (clients, batch, pixels)."""
        first, first_bias, second, second_bias = self._parts(weights)
        hidden = torch.relu(x @ first + first_bias)
        error = torch.softmax(hidden @ second + second_bias, dim=-1)
        error.scatter_add_(-1, y.unsqueeze(-1), torch.full((*y.shape, 1), -1.0))
        error /= x.shape[1]
        behind = (error @ second.mT) * (hidden > 0)
        parts = (x.mT @ behind, behind.sum(dim=1), hidden.mT @ error, error.sum(dim=1))
        return torch.cat([one.reshape(len(weights), -1) for one in parts], dim=1)


class Clients:
    """Their data, their generator, their momentum. `hostile` of them are the last."""

    def __init__(self, images: Images, parts: Sequence[torch.Tensor], hostile: int, seed: int) -> None:
        self._x, self._y = images.x, images.y
        self._parts = list(parts)
        self._counts = torch.tensor([len(part) for part in parts]).unsqueeze(1)
        self._table = torch.nn.utils.rnn.pad_sequence(self._parts, batch_first=True)
        self._hostile = hostile
        self._generator = torch.Generator().manual_seed(seed * 7919 + 1)
        self._momenta: torch.Tensor | None = None

    def flip_labels(self, classes: int) -> None:
        """The hostile ones have wrong labels, and are otherwise as honest as the others."""
        mine = torch.cat(self._parts[len(self._parts) - self._hostile :])
        self._y = self._y.clone()
        self._y[mine] = LabelFlip(classes)(self._y[mine])

    def plant(self, trigger: BackdoorTrigger, side: int, seed: int) -> None:
        """Half of the hostile ones' images have a mark, and are labelled as they want them to be."""
        mine = torch.cat(self._parts[len(self._parts) - self._hostile :])
        self._x, self._y = self._x.clone(), self._y.clone()
        images, labels = trigger(self._x[mine].view(-1, side, side), self._y[mine], seed)
        self._x[mine], self._y[mine] = images.view(len(mine), -1), labels

    def updates(
        self, network: Network, model: torch.Tensor, *, batch: int, steps: int, lr: float, beta: float
    ) -> torch.Tensor:
        """(clients, numbers): what each would send if it were honest."""
        weights = model.expand(len(self._parts), -1)
        for _ in range(steps):
            places = torch.rand(len(self._parts), batch, generator=self._generator, dtype=torch.float64)
            chosen = self._table.gather(1, (places * self._counts).long())
            weights = weights - lr * network.gradients(weights, self._x[chosen], self._y[chosen])
        found = (model - weights) / lr
        self._momenta = found if self._momenta is None else beta * self._momenta + (1.0 - beta) * found
        return self._momenta
