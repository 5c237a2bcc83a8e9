"""What keys and values travel as, and who takes which role."""

from __future__ import annotations

import re

import pytest
import torch

from hostring.integrations.llm.demo.job import make_job
from hostring.integrations.llm.handover.blocks import BlockFormat, CorruptBlock, laid_out, pack, unpack
from hostring.integrations.llm.handover.roles import roles


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_block_is_what_was_sent_in_its_place(dtype: str) -> None:
    form = BlockFormat(dtype, 2, 4, pairs=False)
    kv = torch.randn(2, 5, 2, 4).to(form.torch_dtype)
    block = pack(form, 3, 10, kv)
    assert block.nbytes == form.nbytes(5) == 32 + 2 * 5 * 2 * 4 * (4 if dtype == "float32" else 2)
    assert torch.equal(unpack(form, 3, 10, block), kv)
    for layer, start in ((2, 10), (3, 9)):
        with pytest.raises(CorruptBlock):
            unpack(form, layer, start, block)
    block[-1] ^= 1
    with pytest.raises(CorruptBlock):
        unpack(form, 3, 10, block)


def test_keys_turn_as_the_receivers_do() -> None:
    halves, pairs = BlockFormat("float32", 1, 6, pairs=False), BlockFormat("float32", 1, 6, pairs=True)
    kv = torch.arange(6.0).expand(2, 1, 1, 6).contiguous()
    assert laid_out(kv, halves, pairs)[0].flatten().tolist() == [0, 3, 1, 4, 2, 5]
    assert laid_out(laid_out(kv, halves, pairs), pairs, halves)[0].flatten().tolist() == list(range(6))
    assert torch.equal(laid_out(kv, halves, pairs)[1], kv[1])


@pytest.mark.parametrize(
    ("text", "ranks", "error"),
    [
        ("prefill=0,decode=0", 2, "possible are prefill=0,decode=1"),
        ("prefill=0,decode=2", 3, "possible are prefill=0,decode=1"),
        ("prefill=0,decode=1", 3, "is for 2 ranks, and there are 3"),
        ("prefill=0", 2, "names one of two roles"),
        ("prefill=0,decode=x", 2, "'decode=x'"),
        ("prefill=0,prefill=1", 2, "each once"),
    ],
)
def test_roles_that_cannot_be(text: str, ranks: int, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        roles(text, ranks)
    with pytest.raises(ValueError, match=re.escape(error)):
        make_job(
            model=None, ranks=ranks, dtypes=None, prompts=(), plan=text,
            max_tokens=1, temperature=0.0, top_k=0, top_p=1.0, seed=0, controls=False,
        )  # fmt: skip
