"""What the training examples share: the bundled model from random weights, its text, and one step of it on one rank."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.qwen import Decoder

TINY = files("hostring.integrations.llm") / "tiny"
SHAPE = ModelConfig(2053, 160, 437, 4, 10, 5, 32, max_position_embeddings=512)  # of the bundled model
DOCS = Path(__file__).parent.parent / "docs"
HELD_OUT = 16  # windows at the end of the text that are never trained on
CLIP, DECAY = 1.0, 0.1


def corpus(path: str | None) -> Tensor:
    """The ids of a text file; without one, of hostring's own documentation."""
    sources = [Path(path)] if path else sorted(DOCS.glob("*.md"))
    text = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    tokenizer: Any = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    return torch.tensor(tokenizer.encode(text).ids)


class SmallTraining:
    """The bundled model and AdamW, on one rank. All gradients lie in one flat tensor.

    Args:
        ids: the text. windows, window: how many pieces of the text a step takes, and their length in tokens.
        peak: learning rate after the first `warm_up` of `steps` steps; it falls to a tenth of that on a cosine.
        layers: of the model; None for all.
    """

    def __init__(
        self, ids: Tensor, *, windows: int, window: int, steps: int, peak: float = 2e-3, warm_up: int = 20,
        layers: int | None = None,
    ) -> None:  # fmt: skip
        torch.set_num_threads(1)
        self.model = Decoder(SHAPE if layers is None else replace(SHAPE, num_hidden_layers=layers)).initialise(seed=1)
        self.net: torch.nn.Module = self.model  # what computes the loss: it may be wrapped, by DDP for example
        self.window, self._windows, self._steps, self._peak, self._warm_up = window, windows, steps, peak, warm_up
        self._ids, self._held_out = ids[: -HELD_OUT * window - 1], ids[-HELD_OUT * window - 1 :]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=DECAY)
        self.gradients = torch.zeros(sum(p.numel() for p in self.model.parameters()))
        ends = np.cumsum([p.numel() for p in self.model.parameters()])[:-1].tolist()
        for p, part in zip(self.model.parameters(), self.gradients.tensor_split(ends), strict=True):
            p.grad = part.view_as(p)

    @property
    def tokens(self) -> int:
        """Tokens of one rank's step."""
        return self._windows * self.window

    def backward(self, rank: int, step: int) -> float:
        """Fill `gradients` from this rank's windows of the text at `step`. Returns the loss."""
        generator = torch.Generator().manual_seed(step << 16 | rank)
        starts = torch.randint(len(self._ids) - self.window - 1, (self._windows, 1), generator=generator)
        rows = self._ids[starts + torch.arange(self.window + 1)]  # (windows, window + 1)
        self.gradients.zero_()
        loss = F.cross_entropy(self.net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def update(self, step: int) -> None:
        """Take the step that `gradients` say."""
        share = max(0.0, (step - self._warm_up) / max(1, self._steps - self._warm_up))
        rate = self._peak * min((step + 1) / self._warm_up, 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, share))))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """On the end of the text."""
        rows = self._held_out.unfold(0, self.window + 1, self.window)
        logits = self.model(rows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()

    def state_dict(self) -> dict[str, Any]:
        """Parameters and optimiser."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
