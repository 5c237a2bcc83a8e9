"""One rank's part of a packed decoder: its weights, and how its graphs are put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

from hostring import UnitFold
from hostring.integrations.llm.checkpoint.gguf_file import GgufCheckpoint
from hostring.integrations.llm.checkpoint.gguf_header import TensorInfo
from hostring.integrations.llm.checkpoint.layout import slices_to_read
from hostring.integrations.llm.model.rope import rotary_divisors
from hostring.integrations.llm.model.shards import WHOLE, Ends, ShardPlan
from hostring.integrations.llm.packed.check import check_formats, checked_rows, repacked_formats
from hostring.integrations.llm.packed.expert_weights import experts_of_layer, shared_units
from hostring.integrations.llm.packed.library import Pointer, Unavailable, at, load
from hostring.integrations.llm.packed.memory import Arena
from hostring.integrations.llm.packed.plan import UnitPlan
from hostring.integrations.llm.packed.regions import Fold, Matrices
from hostring.integrations.llm.packed.repack import ROWS_STEP
from hostring.integrations.llm.packed.weights import PackedWeights, column_units, unsupported

MAX_CUTS_PER_LAYER = 64


class PackedDecoder:
    """What one rank computes with, apart from a conversation's cache.

    Args:
        checkpoint: the file; only this rank's part of it is read.
        plan: who holds what. units: where row-parallel products may be cut.
        threads: that compute.
        beside_exact: other ranks compute exact and know no units, so this one brings a single sum, in its own order.
        order: in which the group's all-reduce folds ranks.
        ends: of the model that this rank holds.
        batch_invariant: only kernels that give a row the same bits whatever rows are beside it.

    Attributes:
        nbytes_held: bytes of the file that this rank holds, mapped or copied.
        folds: what this rank brings to the reductions of a layer, by the side of the region. layers: weights, likewise.
        embedding, head: None where this rank has none; n_logits: rows of the head.
        repacked: formats whose matrices are laid out for faster kernels, see `Repacker`.
        rope_divisors: what each rotary frequency is divided by; None where by nothing.

    Raises:
        Unavailable: this file can't be decoded packed here; says why.
    """

    def __init__(
        self,
        checkpoint: GgufCheckpoint,
        plan: ShardPlan,
        units: UnitPlan,
        rank: int,
        threads: int = 1,
        beside_exact: bool = False,
        order: str = "rank",
        ends: Ends = WHOLE,
        batch_invariant: bool = False,
    ) -> None:
        if why := unsupported(checkpoint.config, checkpoint.tensors):
            raise Unavailable(why)
        self.ggml, self.threads = load(), threads
        self.config, self.plan, self.rank = checkpoint.config, plan, rank
        self.beside_exact, self.batch_invariant, self._order = beside_exact, batch_invariant, order
        self.local = plan.local_config(checkpoint.config, rank)
        self.arena = Arena(self.ggml)
        wanted = slices_to_read(checkpoint.config, plan, rank, ends)
        checkpoint.source.plan([*checkpoint.extents(wanted), *checked_rows(checkpoint.tensors)])
        checkpoint.source.read(checked_rows(checkpoint.tensors))
        files = [np.frombuffer(mapped, np.uint8) for mapped in checkpoint.mapped]
        check_formats(self.ggml, files, checkpoint.tensors)
        self.repacked = self._repacked(files, checkpoint.tensors, units, batch_invariant)
        n_layers = self.config.num_hidden_layers
        n_cuts = 3 + n_layers * (MAX_CUTS_PER_LAYER + 2 * len(units.columns))
        read = checkpoint.source.read
        self._weights = PackedWeights(self.arena, checkpoint.mapped, checkpoint.tensors, n_cuts, self.repacked, read)
        self._tensors, self.units = checkpoint.tensors, units
        per_rank = {"attention": units.groups_per_rank(plan), "mlp": units.columns_per_rank(plan)}
        self.folds = {side: self._fold(shares) for side, shares in per_rank.items()}
        self.rope_divisors = self._divisors()
        self.layers = [self._layer(n) for n in range(n_layers)]
        self.embedding = self._weights.whole("token_embd.weight") if ends.embedding else None
        self.norm = self._weights.vector("output_norm.weight")
        head = "output.weight" if "output.weight" in self._tensors else "token_embd.weight"
        self.n_logits = len(plan.vocab_of(rank)) if ends.head else 0
        self.head = self._weights.rows(head, plan.vocab_of(rank)) if ends.head else None
        self._weights.read_ahead()

    @property
    def n_head_rows(self) -> int:
        """Rows of the head as it is multiplied by: some of zeros may follow those of the vocabulary."""
        return 0 if self.head is None else int(at(self.head).ne[1])

    @property
    def nbytes_held(self) -> int:
        return self._weights.nbytes

    def _repacked(
        self,
        files: list[npt.NDArray[np.uint8]],
        tensors: dict[str, TensorInfo],
        units: UnitPlan,
        batch_invariant: bool,
    ) -> frozenset[GGMLQuantizationType]:
        """None where a cut may divide the rows that are interleaved: bits would depend on the plan then."""
        borders = [self.config.head_dim, *(unit.stop for unit in units.columns)]
        if self.config.experts is not None:
            borders += [unit.stop for unit in shared_units(self.config, units.columns)]
        if any(border % ROWS_STEP for border in borders):
            return frozenset()
        return repacked_formats(self.ggml, files, tensors, batch_invariant)

    @property
    def n_slots(self) -> int:
        """Slots of the larger of the two reductions."""
        return max(fold.n_slots for fold in self.folds.values())

    def _fold(self, shares: Sequence[int]) -> Fold:
        """What this rank brings to a reduction over units of which rank r holds `shares[r]`."""
        rank, shared = (0, (shares[self.rank],)) if self.beside_exact else (self.rank, tuple(shares))
        fold = UnitFold(shared, self._order)
        return Fold(fold.brings(rank), fold.n_slots, fold.completes) if sum(shared) else Fold([], 1, 0)

    def _layer(self, n: int) -> dict[str, Matrices]:
        """The weights of each region of a layer, by its side."""
        groups, columns = self.plan.groups_of(self.rank), self.plan.columns_of(self.rank)
        head_dim, group = self.config.head_dim, self.config.group_heads * self.config.head_dim
        q_rows = range(groups.start * group, groups.stop * group)
        kv_rows = range(groups.start * head_dim, groups.stop * head_dim)
        attention = {"attn_q": q_rows, "attn_k": kv_rows, "attn_v": kv_rows}
        o_units = [range(u.start * group, u.stop * group) for u in self.units.groups if u.start in groups]
        down_units = [unit for unit in self.units.columns if unit.start in columns]
        name = f"blk.{n}."
        return {
            "attention": replace(
                self._region(name, "attn_norm", attention, "attn_output", o_units),
                q_norm=self._optional(name + "attn_q_norm.weight"),
                k_norm=self._optional(name + "attn_k_norm.weight"),
            ),
            "mlp": self._region(name, "ffn_norm", {"ffn_gate": columns, "ffn_up": columns}, "ffn_down", down_units)
            if self.config.experts is None
            else experts_of_layer(self._weights, self.config, self.local, name, columns, down_units),
        }

    def _region(self, name: str, norm: str, first: dict[str, range], last: str, units: Sequence[range]) -> Matrices:
        """Of each first matrix the rows that are this rank's; of the last one its units' columns."""
        weights = self._weights
        rows = [
            (weights.rows(f"{name}{stem}.weight", cut), self._optional(f"{name}{stem}.bias", cut))
            for stem, cut in first.items()
        ]
        bias = self._optional(f"{name}{last}.bias") if self.rank == 0 else None
        if bias is not None and not units:
            raise ValueError(f"{name}{last}.bias is added by rank 0, which has no part of that matrix; give it some")
        return Matrices(
            weights.vector(f"{name}{norm}.weight"), rows, weights.columns([f"{name}{last}.weight"], units), bias
        )

    def _divisors(self) -> Pointer | None:
        """What each rotary frequency is divided by, shape (head_dim / 2,), where the model says so."""
        config = self.config
        if config.rope_scaling.kind == "none":
            return None
        divisors = rotary_divisors(config.head_dim, config.rope_theta, config.rope_scaling)
        return self._weights.constant(np.array(divisors, np.float32))

    def _optional(self, name: str, elements: range | None = None) -> Pointer | None:
        return self._weights.vector(name, elements) if name in self._tensors else None


def units_of(checkpoint: GgufCheckpoint) -> UnitPlan:
    """The units of a file: its cuts lie on the borders of its blocks.

    Raises:
        ValueError: its FFN columns are not whole blocks.
    """
    return UnitPlan.of(checkpoint.config, *column_units(checkpoint.config, checkpoint.tensors))
