"""A small model and its training, which the tests of DDP and of sharded training share."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

F32_ROUNDING = 20 * 1.2e-7 * 8  # 20 steps, each a few roundings of values around 1 in another order


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))


def batches(rank: int, steps: int = 20) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(50 + rank)
    return [(torch.randn(6, 12, generator=generator), torch.randn(6, 3, generator=generator)) for _ in range(steps)]


def train(net, rank: int, steps: int = 20, device: str = "cpu") -> list[float]:
    """Losses of all steps, then the sum of all parameters."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in ((x.to(device), y.to(device)) for x, y in batches(rank, steps)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same_everywhere(by_rank) -> None:
    for _, parameters in by_rank[1:]:
        assert all(torch.equal(a, b) for a, b in zip(parameters, by_rank[0][1], strict=True))
