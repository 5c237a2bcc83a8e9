"""What stands on torch.distributed: functional collectives, torch.compile, Hugging Face transformers."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch_ranks import pool  # noqa: E402

# ---------------------------------------------------------------------- functional collectives


def waited(x):
    return x.wait() if hasattr(x, "wait") else x


def _functional(group):
    import torch.distributed._functional_collectives as fc

    warnings.simplefilter("ignore", FutureWarning)  # torch 2.14 has new names for some
    pg, rank, n = dist.group.WORLD, group.rank, group.world_size
    row = torch.arange(4.0 * n).view(2 * n, 2) + 100 * rank
    rows = [torch.arange(4.0 * n).view(2 * n, 2) + 100 * r for r in range(n)]
    total = sum(rows)
    assert torch.equal(fc.all_reduce(row, "sum", pg).wait(), total)
    assert torch.equal(fc.all_reduce(row, "avg", pg).wait(), total / n)
    assert torch.equal(fc.all_gather_tensor(row, 0, pg).wait(), torch.cat(rows))
    assert torch.equal(waited(fc.all_gather_tensor(row, 1, pg)), torch.cat(rows, 1))
    assert torch.equal(fc.reduce_scatter_tensor(row, "sum", 0, pg).wait(), total.chunk(n)[rank])
    assert torch.equal(fc.broadcast(row, n - 1, pg).wait(), rows[n - 1])
    parts = fc.all_to_all_single(row, [2] * n, [2] * n, pg).wait()
    assert torch.equal(parts, torch.cat([r.chunk(n)[rank] for r in rows]))
    both = fc.all_reduce_coalesced([row, row + 1], "max", pg)
    assert torch.equal(both[1].wait(), rows[n - 1] + 1)
    gathered = fc.all_gather_into_tensor_coalesced([row, row * 2], pg)
    assert torch.equal(gathered[1].wait(), torch.cat(rows) * 2)
    scattered = fc.reduce_scatter_tensor_coalesced([row, row], "sum", [0, 0], pg)
    assert torch.equal(scattered[1].wait(), total.chunk(n)[rank])
    out = torch.empty(2 * n * n, 2)
    torch.ops._c10d_functional.all_gather_into_tensor_out(row, n, pg.group_name, out=out)
    torch.ops._c10d_functional.wait_tensor(out)
    assert torch.equal(out, torch.cat(rows))

    leaf = torch.full((2 * n,), rank + 1.0, requires_grad=True)
    fc.all_gather_tensor_autograd(leaf, 0, pg).sum().backward()
    assert leaf.grad.tolist() == [float(n)] * (2 * n)
    leaf.grad = None
    fc.reduce_scatter_tensor_autograd(leaf, "sum", 0, pg).sum().backward()
    assert leaf.grad.tolist() == [1.0] * (2 * n)
    return True


@pytest.mark.parametrize("world_size", [2, 3])
def test_functional_collectives(world_size):
    assert all(pool.run(world_size, _functional))


def _autograd_functions(group):
    from torch.distributed.nn import functional as dn

    x = torch.full((2,), group.rank + 1.0, requires_grad=True)
    y = dn.all_reduce(x * 2, group=dist.group.WORLD)
    y.sum().backward()
    return y.tolist(), x.grad.tolist()


def test_differentiable_collectives():
    assert pool.run(2, _autograd_functions) == [([6.0, 6.0], [4.0, 4.0])] * 2


# ---------------------------------------------------------------------- torch.compile


def _compiled(group, backend):
    import torch.distributed._functional_collectives as fc

    warnings.simplefilter("ignore")
    pg, n = dist.group.WORLD, group.world_size

    def step(x):
        y = fc.all_reduce((x * 2).sin(), "sum", pg)
        z = fc.all_gather_tensor(y + 1, 0, pg)
        return fc.reduce_scatter_tensor(z * z, "sum", 0, pg) * 0.5

    def eager_names(x):
        y = x * 2
        dist.all_reduce(y)  # dynamo turns it into the functional form
        return y + 1

    x = torch.linspace(0, 1, 2 * n) + group.rank
    for fn in (step, eager_names):
        expected = fn(x)
        got = torch.compile(fn, backend=backend, fullgraph=True)(x)
        assert torch.allclose(got, expected, atol=1e-6), fn
    torch._dynamo.reset()
    return True


def _graph_breaks(group):
    warnings.simplefilter("ignore")
    other = 1 - group.rank

    def mixed(x):
        y = x * 2
        dist.all_reduce(y)
        z = torch.zeros_like(y)
        if group.rank == 0:
            dist.send(y + 1, other)
            dist.recv(z, other)
        else:
            dist.recv(z, other)
            dist.send(y + 1, other)
        return z * 3

    x = torch.arange(4.0) + group.rank
    return torch.compile(mixed, backend="aot_eager")(x).tolist()


def test_compile_breaks_its_graph_at_calls_it_does_not_know():
    assert pool.run(2, _graph_breaks) == [[3.0 * (2 * (2 * k + 1) + 1) for k in range(4)]] * 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_around_collectives(backend):
    assert all(pool.run(2, _compiled, backend))


def _compiled_ddp(group):
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    step = torch.compile(net, backend="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for k in range(3):
        optimizer.zero_grad()
        loss = step(torch.full((4, 8), 0.1 * (k + group.rank))).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch._dynamo.reset()
    return losses


def test_compiled_ddp():
    for ours, theirs in zip(pool.run(2, _compiled_ddp), pool.run(2, _compiled_ddp, backend="gloo"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


# ---------------------------------------------------------------------- debugging


def _detail(group):
    dist.set_debug_level_from_env()
    try:
        net = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
        net(torch.ones(3, 4)).sum().backward()
        return net.module.weight.grad.sum().item()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_ddp_under_detailed_debugging():
    assert pool.run(2, _detail, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) == [24.0, 24.0]


# ---------------------------------------------------------------------- transformers


def _qwen(group, folder):
    from transformers import AutoModelForCausalLM

    split = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32).eval()
    ids = torch.tensor([[1, 5, 9, 2, 7, 3]])
    with torch.no_grad():
        logits = split(ids).logits
        text = split.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    weight = split.model.layers[0].mlp.gate_proj.weight
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    return logits, text.tolist(), tuple(local.shape)


@pytest.mark.parametrize("world_size", [2])
def test_transformers_tensor_parallel_qwen3(world_size, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    whole = transformers.Qwen3ForCausalLM(config).eval()
    whole.save_pretrained(tmp_path)
    ids = torch.tensor([[1, 5, 9, 2, 7, 3]])
    with torch.no_grad():
        expected = whole(ids).logits
        text = whole.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0).tolist()
    for logits, generated, shape in pool.run(world_size, _qwen, str(tmp_path)):
        assert (logits - expected).abs().max() < 1e-6
        assert generated == text
        assert shape == (64 // world_size, 32)  # each rank holds its part
