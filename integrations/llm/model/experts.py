"""Experts by torch, on any number of rows: each expert multiplies the rows that use it, and sums are made in rising
order of the experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hostring.integrations.llm.model.routing import Router, Routes


@dataclass(frozen=True)
class Gated:
    """What the last matrices of the experts multiply.

    Attributes:
        shape: of what they give, shape (..., hidden).
        experts: number, rows that use it, its weight in each and silu(gate) * up of each, in rising order.
        shared: silu(gate) * up of the shared expert for all rows, and its weights; None where this rank has none of it.
    """

    shape: torch.Size
    experts: list[tuple[int, Tensor, Tensor, Tensor]]
    shared: tuple[Tensor, Tensor] | None


def gate_experts(side: nn.Module, x: Tensor, routes: Routes) -> Gated:
    """silu(gate) * up of the experts that are used. side: their weights. x: shape (..., hidden), f32."""
    rows, experts, here = x.flatten(0, -2), cast(nn.ModuleList, side.experts), _here(side)
    found = [
        (number, at, weight, _gated(experts[number - here.start], rows[at]))
        for number, at, weight in routes.by_expert()
        if number in here
    ]
    shared = None if routes.shared is None else (_gated(side.get_submodule("shared"), rows), routes.shared)
    return Gated(x.shape, found, shared)


def mix(side: nn.Module, gated: Gated) -> Tensor:
    """This rank's part of the weighted sum of the experts, in the shape of the stream, f32."""
    experts = cast(nn.ModuleList, side.experts)
    first = _here(side).start
    total = torch.zeros(gated.shape, device=side.get_parameter("router.weight").device).flatten(0, -2)
    for number, at, weight, x in gated.experts:
        total[at] += _product(experts[number - first], x) * weight
    if gated.shared is not None:
        x, weight = gated.shared
        total += _product(side.get_submodule("shared"), x) * weight
    return total.view(gated.shape)


def _here(side: nn.Module) -> range:
    """Which experts this rank has something of."""
    return cast(Router, side.router).mixture.here


def _gated(expert: nn.Module, rows: Tensor) -> Tensor:
    gate, up = expert.get_submodule("gate_up_proj")(rows).chunk(2, -1)
    return F.silu(gate) * cast(Tensor, up)


def _product(expert: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = expert.get_submodule("down_proj")(x)
    return found.float()
