"""The head's choice of a sequence's next token: bias and penalties, the sampler, and probabilities."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hostring.integrations.llm.model.sampling import Sampler
from hostring.integrations.llm.serve.text_request import TextRequest, TokenLogprob


@dataclass(frozen=True)
class Logits:
    """What all ranks brought for one choice: values, shape (n,), f32, and their ids. Ids below 0 stand for nothing."""

    values: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32]

    @staticmethod
    def of(stacked: npt.NDArray[np.int32]) -> Logits:
        """stacked: what `local_candidates` gave on every rank, shape (world_size, 2, n_candidates)."""
        return Logits(np.ascontiguousarray(stacked[:, 0]).view(np.float32).ravel(), stacked[:, 1].ravel())


class Chooser:
    """Chooses one sequence's tokens, on the head rank alone."""

    def __init__(self, request: TextRequest) -> None:
        self._request = request
        self._sampler = Sampler(request.sampling)
        self._counts: Counter[int] = Counter()  # of generated tokens

    def choose(self, logits: Logits) -> int | None:
        """The next token's id, or None when the largest logit is not a finite number."""
        changed = self._guided(self._changed(logits))
        token = self._sampler.pick(changed.values, changed.ids)
        if token is not None:
            self._counts[token] += 1
        return token

    def _changed(self, logits: Logits) -> Logits:
        """With bias and penalties."""
        request = self._request
        if not (request.logit_bias or request.frequency_penalty or request.presence_penalty):
            return logits
        changes = dict(request.logit_bias)
        if request.frequency_penalty or request.presence_penalty:
            for token, count in self._counts.items():
                penalty = request.frequency_penalty * count + request.presence_penalty
                changes[token] = changes.get(token, 0.0) - penalty
        if not changes:
            return logits
        values = logits.values.copy()
        by_id = np.argsort(logits.ids, kind="stable")
        ids = np.fromiter(changes, np.int32, len(changes))
        places = np.searchsorted(logits.ids, ids, sorter=by_id)
        for token, place in zip(ids.tolist(), places.tolist(), strict=True):
            if place < len(by_id) and logits.ids[by_id[place]] == token:
                values[by_id[place]] += changes[token]
        return Logits(values, logits.ids)

    def _guided(self, logits: Logits) -> Logits:
        """Without tokens that may not come."""
        guide = self._request.guide
        if guide is None:
            return logits
        return Logits(np.where(guide.allowed(logits.ids), logits.values, np.float32(-np.inf)), logits.ids)

    def logprob(self, logits: Logits, token: int) -> TokenLogprob:
        """The model's own probability of `token`, before temperature, bias and penalties. Needs all logits."""
        real = (logits.ids >= 0) & np.isfinite(logits.values)
        values, ids = logits.values[real].astype(np.float64), logits.ids[real]
        largest = values.max()
        values -= largest + np.log(np.exp(values - largest).sum())
        own = values[ids == token]
        wanted = min(self._request.top_logprobs or 0, len(values))
        best = np.argpartition(-values, wanted - 1)[:wanted] if wanted else np.empty(0, np.int64)
        best = best[np.lexsort((ids[best], -values[best]))]
        top = tuple((int(ids[i]), float(values[i])) for i in best)
        return TokenLogprob(token, float(own[0]) if own.size else -np.inf, top)
