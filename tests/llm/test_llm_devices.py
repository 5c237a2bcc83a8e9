"""A decoder on accelerators computes what one on CPUs does, with few waits for the device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import in_threads

import hostring
from hostring.integrations.llm.demo.job import BUNDLED
from hostring.integrations.llm.generate import load_model
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.devices import find_device, sums_wide
from hostring.integrations.llm.model.qwen import Decoder
from hostring.integrations.llm.model.sampling import local_candidates
from hostring.integrations.llm.model.tensor_parallel import HiddenReducer, RowParallelLinear, gather_logits
from hostring.integrations.llm.sharded import DTYPES, parallelize

Rank = dict[str, Any]


PROMPT, MORE = [5, 6, 7, 8, 9, 10, 11], [12, 13]


# Each side rounds in its own order: see test_llm_model.py for f32, where the roundings of long sums mostly cancel.
# In 16 bits both round what they add up, so that what is left are the last bits of some inputs.
ROUNDINGS = {"float32": 40, "float16": 8, "bfloat16": 8}


def _refusals() -> list[str]:
    """What the stand-in says to code that forgets it."""
    there, here = torch.ones(2, 3, device="fake"), torch.ones(2, 3)
    calls: list[Callable[[], Any]] = [
        there.numpy,
        lambda: there + here,
        lambda: torch.nn.functional.linear(there, here),
        lambda: torch.nn.functional.embedding(torch.tensor([1]), there),
        lambda: torch.addcmul(torch.tensor(1.0), there, torch.tensor(2.0)),
        lambda: torch.cat((there, here)),
    ]
    said = []
    for call in calls:
        with pytest.raises((RuntimeError, TypeError)) as refusal:
            call()
        said.append(str(refusal.value))
    return said


def _memory() -> list[list[float]]:
    """Views stay views on the stand-in, and what works in place or into `out` reaches them."""
    x = torch.zeros(2, 3, device="fake")
    row, odd = x[1], x.t()[1]
    row.fill_(2.0).mul_(1.5)
    odd.add_(1.0)
    wide = torch.empty(0, device="fake")
    torch.add(x, 1, out=wide)
    (best, _), halves = x.max(1), x.to(torch.float16).chunk(3, 1)
    return [t.cpu().flatten().tolist() for t in (x, row, odd, wide, best, halves[1])]


def test_the_stand_in_behaves_like_a_device(worker: Callable[..., Any]) -> None:
    said = worker(_refusals)
    assert "can't convert fake:0 device type tensor to numpy" in said[0]
    assert all("same device" in words or "CPU scalars" in words for words in said[1:]), said
    assert worker(_memory) == [[0, 1, 0, 3, 4, 3], [3, 4, 3], [1, 4], [1, 2, 1, 4, 5, 4], [1, 4], [1, 4]]


def compute(
    path: Path, devices: tuple[str, ...], dtypes: tuple[str, ...], wide_products: bool = False, **options: Any
) -> list[Rank]:
    """A prompt's logits and two answers through one cache, and what lies where, by rank."""
    if "fake_device" in sys.modules:
        sys.modules["fake_device"].wide_products = wide_products  # type: ignore[attr-defined]
    sums_wide.cache_clear()

    def body(comm: hostring.Comm) -> Rank:
        device, dtype = devices[comm.rank], dtypes[comm.rank]
        model = load_model(path, comm, device=device, dtype=dtype, max_seq=32, hash_activations=True, **options)
        model.tokenizer.eos_ids = frozenset()
        sharded, cache = model.sharded, model.sharded.new_cache()
        with torch.inference_mode():
            local = sharded.decoder(torch.tensor([PROMPT], device=sharded.forward.device))
        first = model.generate(PROMPT, max_tokens=5, cache=cache)
        second = model.generate([first.tokens[-1], *MORE], max_tokens=2, cache=cache)
        (slot, *_) = cache.extend(1)
        decoder = sharded.decoder
        return {
            "logits": gather_logits(comm, local, sharded.plan),
            "tokens": first.tokens + second.tokens,
            "hashes": (first.stats.activation_sha256, second.stats.activation_sha256),
            "traffic": (first.stats.bytes_per_token, first.stats.expected_bytes_per_token),
            "places": {t.device.type for t in (*decoder.parameters(), *decoder.buffers(), slot.keys, local)},
            "cached as": slot.keys.dtype,
            "multiplied as": decoder.layers[0].attention.o_proj.weight.dtype,
        }

    return in_threads(len(devices), body)


def check(on_devices: list[Rank], on_cpus: list[Rank], dtypes: tuple[str, ...]) -> None:
    """Ranks agree to the bit, and are close to those of CPUs."""
    for rank in on_devices:
        assert rank["hashes"] == on_devices[0]["hashes"]
        assert rank["tokens"] == on_devices[0]["tokens"]
        assert rank["traffic"][0] == rank["traffic"][1]
    got, want = on_devices[0]["logits"], on_cpus[0]["logits"]
    assert np.abs(want).max() > 3
    worst = max(ROUNDINGS[d] * torch.finfo(DTYPES[d]).eps for d in dtypes)
    assert np.abs(got - want).max() <= worst * np.abs(want).max()
    if set(dtypes) == {"float32"}:
        assert on_devices[0]["tokens"] == on_cpus[0]["tokens"]


@pytest.mark.parametrize(
    ("devices", "dtypes", "wide_products"),
    [
        (("fake", "fake"), ("float32", "float32"), False),
        (("cpu", "fake", "fake"), ("float32",) * 3, False),
        (("fake", "cpu"), ("float16", "float16"), False),
        (("fake", "cpu"), ("bfloat16", "bfloat16"), True),
        (("fake", "fake", "cpu"), ("float16", "bfloat16", "float32"), True),
    ],
)
def test_ranks_on_devices_compute_what_cpus_do(
    devices: tuple[str, ...], dtypes: tuple[str, ...], wide_products: bool, worker: Callable[..., Any]
) -> None:
    ranks = worker(compute, BUNDLED, devices, dtypes, wide_products)
    check(ranks, compute(BUNDLED, ("cpu",) * len(devices), dtypes), dtypes)
    for device, dtype, rank in zip(devices, dtypes, ranks, strict=True):
        assert rank["places"] == {device}
        assert rank["cached as"] == (torch.float32 if device == "cpu" else DTYPES[dtype])
        assert rank["multiplied as"] == (DTYPES[dtype] if device == "fake" and wide_products else torch.float32)


@pytest.mark.parametrize(
    ("family", "options"), [("qwen3-untied-biased", {}), ("llama-biased-long", {"replicate_embedding": False})]
)
def test_norms_of_heads_biases_and_split_embeddings_on_devices(
    family: str, options: dict[str, bool], tmp_path: Path, worker: Callable[..., Any]
) -> None:
    from llm_models import hf_model, save

    path, dtypes = save(hf_model(family), tmp_path), ("float32",) * 2
    check(
        worker(compute, path, ("fake", "cpu"), dtypes, **options),
        compute(path, ("cpu", "cpu"), dtypes, **options),
        dtypes,
    )


def _copies(n_ranks: int) -> tuple[int, int]:
    """Copies to the host during one decode step on the device, and the sub-layers that the model has."""
    import fake_device

    def body(comm: hostring.Comm) -> tuple[int, int]:
        model = load_model(BUNDLED, comm, device="cpu" if comm.rank else "fake", max_seq=32)
        model.tokenizer.eos_ids = frozenset()
        seen: list[int] = []
        model.generate(PROMPT, max_tokens=4, on_token=lambda token: seen.append(len(fake_device.copied_to_host)))
        return seen[-1] - seen[-2], 2 * model.sharded.config.num_hidden_layers

    return in_threads(n_ranks, body)[0]


def test_a_token_waits_for_the_device_once_per_reduction_and_once_for_the_candidates(
    worker: Callable[..., Any],
) -> None:
    copies, sublayers = worker(_copies, 2)
    assert copies == sublayers + 1


def _candidates(logits: list[list[float]], widths: list[int]) -> list[np.ndarray]:
    import fake_device

    found = []
    for row in logits:
        there = torch.tensor(row).to("fake")
        for width in widths:
            before = len(fake_device.copied_to_host)
            found.append(local_candidates(there, width, 100))
            assert len(fake_device.copied_to_host) == before + 1
    return found


def test_candidates_are_those_of_a_cpu(worker: Callable[..., Any]) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(-4, 5, (30,), generator=generator).mul(0.5).tolist() for _ in range(4)]  # ties are the rule
    rows += [[0.0, float("nan"), 2.0, 1.0], [-0.0, 0.0, -0.0, 0.0, -1.0], [3.0]]
    widths = [1, 2, 5, 29, 30, 40]
    expected = [local_candidates(torch.tensor(row), width, 100) for row in rows for width in widths]
    for got, want in zip(worker(_candidates, rows, widths), expected, strict=True):
        np.testing.assert_array_equal(got, want)


def _large_sums(wide_products: bool) -> list[float]:
    import fake_device

    fake_device.wide_products = wide_products
    sums_wide.cache_clear()
    with hostring.init(0, 1) as comm:
        weight, bias = torch.full((3, 40), 200.0, device="fake"), torch.tensor([0.0, 1.0, -1.0], device="fake")
        row = RowParallelLinear(weight, bias, torch.float16, HiddenReducer(comm, 3))
        return row(torch.full((2, 1, 40), 100.0, device="fake")).cpu()[1, 0].tolist()


@pytest.mark.parametrize("wide_products", [True, False])
def test_partial_sums_hold_what_float16_cannot(wide_products: bool, worker: Callable[..., Any]) -> None:
    assert worker(_large_sums, wide_products) == [800_000.0, 800_001.0, 799_999.0]


def _cut_up() -> tuple[torch.Tensor, set[str]]:
    whole = Decoder(ModelConfig(31, 24, 36, 2, 4, 2, 6, max_position_embeddings=16)).initialise(seed=1, std=0.3).eval()
    tokens = torch.tensor([[1, 2, 3]])

    def body(comm: hostring.Comm) -> Any:
        model = parallelize(whole, comm, device="auto")
        with torch.inference_mode():
            logits = gather_logits(comm, model.decoder(tokens.to(model.forward.device)), model.plan)
        return logits, model.forward.device.type, {p.device.type for p in whole.parameters()}

    (logits, device, left), *_ = in_threads(2, body)
    with torch.inference_mode():
        np.testing.assert_allclose(logits, whole(tokens).numpy(), rtol=0, atol=1e-5)
    return device, left


def test_a_decoder_in_memory_is_cut_up_onto_a_device_and_stays_where_it_is(worker: Callable[..., Any]) -> None:
    assert worker(_cut_up) == ("fake", {"cpu"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
@pytest.mark.parametrize("devices", [("auto", "auto"), ("cpu", "auto"), ("auto", "cpu", "auto")])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_on_an_accelerator(devices: tuple[str, ...], dtype: str) -> None:
    dtypes, kind = (dtype,) * len(devices), find_device("auto").type
    ranks = compute(BUNDLED, devices, dtypes)
    check(ranks, compute(BUNDLED, ("cpu",) * len(devices), dtypes), dtypes)
    assert [rank["places"] for rank in ranks] == [{kind if device == "auto" else "cpu"} for device in devices]
