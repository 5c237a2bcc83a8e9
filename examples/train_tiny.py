"""Train the bundled model: a small Qwen3-style decoder, from random weights, data-parallel over hostring.

    bible -f -l 4000 gen1:1-rev22:21 > kjv.txt          # Debian: bible-kjv, bible-kjv-text
    hostring launch -n 2 examples/train_tiny.py --text kjv.txt --out tiny --minutes 25

Every rank draws its own windows of the text. One all_reduce per step averages the gradients, loss and clock. All
ranks get the same bits, so their weights stay equal although no rank sends its weights. The hashes at the end show it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

import hostring
from hostring.integrations.llm.checkpoint.whole_model import to_hf_state
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.qwen import Decoder

END = "<|endoftext|>"
VOCAB = 2053  # prime, as are 5 KV heads; the FFN is 19 * 23 wide: nothing divides by two or three ranks
HELD_OUT_EVERY = 50
PEAK_RATE, WARM_UP, DECAY, CLIP = 3e-3, 0.04, 0.1, 1.0


def documents(text: str) -> list[str]:
    """Chapters as flowing text. Lines that begin with book, chapter and verse ("Ge1:1 In the …") lose that label."""
    chapters: dict[str, list[str]] = {}
    for line in text.splitlines():
        label = re.match(r"(\w+?\d+):\d+ ", line)
        words = line[label.end() :] if label else line
        if words.strip():
            chapters.setdefault(label.group(1) if label else "", []).append(words.strip())
    return [" ".join(verses) for verses in chapters.values()]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE: any text can be encoded, frequent words are one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def stream(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All texts as one row of ids, each closed by the end-of-text token."""
    end = tokenizer.token_to_id(END)
    return torch.tensor([i for e in tokenizer.encode_batch(texts) for i in (*e.ids, end)])


@dataclass
class Flat:
    """All weights and all gradients as two flat buffers that the parameters are views of.

    Attributes:
        matrices, vectors: the two halves of the weights, as the optimiser sees them; only matrices decay.
        shared: gradients, then loss and elapsed share of the time: what one all_reduce averages.
    """

    matrices: torch.nn.Parameter
    vectors: torch.nn.Parameter
    shared: Tensor

    @staticmethod
    def of(model: Decoder) -> Flat:
        parameters = sorted(model.parameters(), key=lambda p: -p.dim())
        total, in_matrices = (sum(p.numel() for p in parameters if p.dim() >= d) for d in (0, 2))
        weights, shared = torch.empty(total), torch.zeros(total + 2)
        start = 0
        for p in parameters:
            span = slice(start, start + p.numel())
            weights[span] = p.data.view(-1)
            p.data, p.grad = weights[span].view_as(p), shared[span].view_as(p)
            start = span.stop
        flat = Flat(torch.nn.Parameter(weights[:in_matrices]), torch.nn.Parameter(weights[in_matrices:]), shared)
        flat.matrices.grad, flat.vectors.grad = shared[:in_matrices], shared[in_matrices:total]
        return flat

    def digest(self) -> np.ndarray:
        """sha256 of the weights."""
        parts = (p.detach().numpy().tobytes() for p in (self.matrices, self.vectors))
        return np.frombuffer(hashlib.sha256(b"".join(parts)).digest(), np.uint8).copy()


def rate(share: float) -> float:
    """Learning rate after `share` of the time: a short climb, then a cosine down to a fiftieth."""
    if share < WARM_UP:
        return PEAK_RATE * max(share, 1e-4) / WARM_UP
    return PEAK_RATE * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, (share - WARM_UP) / (1 - WARM_UP)))))


class Training:
    """One rank's side of the training."""

    def __init__(self, args: argparse.Namespace, comm: hostring.Comm) -> None:
        self.args, self.comm = args, comm
        texts = documents(Path(args.text).read_text(encoding="utf-8", errors="replace"))
        kept = [t for i, t in enumerate(texts) if i % HELD_OUT_EVERY]
        self.tokenizer = train_tokenizer(kept)
        self.ids = stream(self.tokenizer, kept)
        self.held_out = stream(self.tokenizer, texts[::HELD_OUT_EVERY])
        self.model = Decoder(ModelConfig(VOCAB, 160, 437, 4, 10, 5, 32, max_position_embeddings=512)).initialise(seed=1)
        self.flat = Flat.of(self.model)
        groups = [
            {"params": [self.flat.matrices], "weight_decay": DECAY},
            {"params": [self.flat.vectors], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
        self.step, self.elapsed, self.loss = 0, 0.0, math.nan
        self.checkpoint = Path(args.checkpoint or f"{args.out}.checkpoint.pt")
        if self.checkpoint.exists():
            self.resume()
        self.generator = torch.Generator().manual_seed(1000 * self.step + comm.rank)

    @property
    def tokens_per_step(self) -> int:
        return int(self.args.windows * self.args.window * self.comm.world_size)

    def run(self) -> None:
        head, columns = self.comm.rank == 0, (BarColumn(None), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, disable=not head) as progress:
            bar = progress.add_task("starting", total=1.0)
            before = saved = self.elapsed
            first, started = self.step, monotonic()
            while self.elapsed < self.args.minutes * 60:
                share = self.train_step((before + monotonic() - started) / (self.args.minutes * 60))
                self.elapsed = share * self.args.minutes * 60
                if head and self.step % 10 == 0:
                    words = self.describe((monotonic() - started) / (self.step - first))
                    progress.update(bar, completed=share, description=words)
                if head and self.elapsed - saved > 60:
                    self.save_checkpoint()
                    saved = self.elapsed
                    if not progress.console.is_terminal:
                        print(words, flush=True)

    def train_step(self, my_share: float) -> float:
        """One step. Returns the share of the time that has passed, as all ranks see it."""
        starts = torch.randint(len(self.ids) - self.args.window - 1, (self.args.windows, 1), generator=self.generator)
        rows = self.ids[starts + torch.arange(self.args.window + 1)]  # (windows, window + 1)
        self.flat.shared.zero_()
        logits = self.model(rows[:, :-1])  # (windows, window, vocab)
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self.flat.shared[-2], self.flat.shared[-1] = loss.item(), my_share
        self.comm.all_reduce(self.flat.shared, "avg")
        mean_loss, share = self.flat.shared[-2:].tolist()
        for group in self.optimizer.param_groups:
            group["lr"] = rate(share)
        torch.nn.utils.clip_grad_norm_([self.flat.matrices, self.flat.vectors], CLIP)
        self.optimizer.step()
        self.step += 1
        self.loss = mean_loss if math.isnan(self.loss) else 0.98 * self.loss + 0.02 * mean_loss
        return float(share)

    def describe(self, seconds_per_step: float) -> str:
        waited = self.comm.counters.waited_for
        whom = (
            f", waited {sum(waited.values()):.0f} s for rank {max(waited, key=lambda r: waited[r])}" if waited else ""
        )
        return f"step {self.step}, loss {self.loss:.3f}, {self.tokens_per_step / seconds_per_step:,.0f} tokens/s{whom}"

    def save_checkpoint(self) -> None:
        state = {
            "weights": [self.flat.matrices.data, self.flat.vectors.data],
            "optimizer": self.optimizer.state_dict(),
            "progress": (self.step, self.elapsed, self.loss),
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def resume(self) -> None:
        state = torch.load(self.checkpoint)
        self.flat.matrices.data.copy_(state["weights"][0])
        self.flat.vectors.data.copy_(state["weights"][1])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.elapsed, self.loss = state["progress"]

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean over windows of the chapters that were not trained on, divided among the ranks."""
        window = self.args.window
        rows = self.held_out[: (len(self.held_out) - 1) // window * window + 1].unfold(0, window + 1, window)
        sums = torch.zeros(2)
        for row in rows[self.comm.rank :: self.comm.world_size]:
            sums += torch.tensor(
                [F.cross_entropy(self.model(row[None, :-1])[0], row[1:], reduction="sum").item(), window]
            )
        total, count = self.comm.all_reduce(sums).tolist()
        return float(total / count)

    def finish(self) -> None:
        digests = self.comm.all_gather(self.flat.digest())  # (world_size, 32)
        if not (digests == digests[0]).all():
            raise SystemExit(
                f"rank {self.comm.rank}: the weights of the ranks differ: {[bytes(d).hex()[:16] for d in digests]}"
            )
        held_out = self.held_out_loss()
        if self.comm.rank == 0:
            save_model(Path(self.args.out), self.model, self.tokenizer)
            self.checkpoint.unlink(missing_ok=True)
            passes = self.step * self.tokens_per_step / len(self.ids)
            print(
                f"{self.step} steps of {self.tokens_per_step} tokens ({passes:.1f} passes over "
                f"{len(self.ids)} tokens), loss {self.loss:.3f}, on held-out chapters {held_out:.3f}"
            )
            print(
                f"weights sha256 {bytes(digests[0]).hex()} on all {self.comm.world_size} ranks; wrote {self.args.out}"
            )


def save_model(out: Path, model: Decoder, tokenizer: Tokenizer) -> None:
    """A directory that transformers loads as well."""
    out.mkdir(parents=True, exist_ok=True)
    end = tokenizer.token_to_id(END)
    specials = {"eos_token_id": end, "bos_token_id": None, "pad_token_id": None}
    tied = model.config.tie_word_embeddings
    tensors = {
        n: t.to(torch.bfloat16).contiguous()
        for n, t in to_hf_state(model).items()
        if not (tied and n == "lm_head.weight")
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    files = {
        "config.json": {**model.config.to_hf(), **specials, "torch_dtype": "bfloat16", "use_cache": True},
        "generation_config.json": {
            "eos_token_id": end,
            "do_sample": True,
            "temperature": 0.7,
            "top_k": 40,
            "top_p": 0.95,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.config.max_position_embeddings,
        },
    }
    for name, fields in files.items():
        (out / name).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="text file; lines may begin with labels such as Ge1:1")
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--windows", type=int, default=8, help="windows per rank and step")
    parser.add_argument("--window", type=int, default=192, help="tokens per window")
    parser.add_argument(
        "--checkpoint", help="written every minute, resumed from if it exists; OUT.checkpoint.pt by default"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    with hostring.init() as comm:
        training = Training(args, comm)
        training.run()
        training.finish()


if __name__ == "__main__":
    main()
