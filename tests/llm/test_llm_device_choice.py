"""Which device a rank takes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import in_threads

import hostring
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.demo.job import BUNDLED, Job, make_job
from hostring.integrations.llm.demo.start import generate
from hostring.integrations.llm.generate import load_model
from hostring.integrations.llm.model.devices import find_device
from hostring.integrations.llm.sharded import build


def _chosen(name: str) -> str:
    return str(find_device(name))


def test_a_device_that_is_not_there_is_refused_before_weights_are_read(worker: Callable[..., Any]) -> None:
    checkpoint = open_checkpoint(BUNDLED)
    with hostring.init(0, 1) as comm:
        refused = {
            "cuda:99": "no device 'cuda:99' here",
            "tpu": "'tpu' is unknown to torch",
            "meta": "no device 'meta' here",
        }
        refused["cuda:256"] = "no device 'cuda:256' here"  # which torch takes for cuda:0
        for name, words in refused.items():
            with pytest.raises(ValueError, match=words) as refusal:
                build(checkpoint, comm, device=name)
            assert f"torch {torch.__version__} finds " in str(refusal.value)
            with pytest.raises(ValueError, match=words):
                load_model(BUNDLED, comm, device=name)
    assert checkpoint.bytes_read == 0
    assert find_device(torch.device("cpu")) == find_device("cpu") == torch.device("cpu")
    with pytest.raises(
        ValueError, match=r"no device 'fake:3' here; torch [^ ]+ finds cpu, fake:0: take one of these, or auto"
    ):
        worker(_chosen, "fake:3")
    assert worker(_chosen, "auto") == "fake"


def _shared_out(n_devices: int) -> list[str]:
    fake, before = torch.fake, torch.fake.device_count  # type: ignore[attr-defined]
    fake.device_count = lambda: n_devices
    place = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(place)
    try:
        return [str(find_device("auto", 0)), str(find_device("auto", 1)), str(find_device("auto"))]
    finally:
        fake.device_count = before
        for name in place:
            del os.environ[name]


def test_the_ranks_of_a_host_share_its_accelerators_out(worker: Callable[..., Any]) -> None:
    assert worker(_shared_out, 2) == ["fake:0", "fake:1", "fake:1"]
    assert worker(_shared_out, 1) == ["fake", "fake", "fake"]


def test_the_demo_refuses_a_device_before_a_rank_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hostring.commands.cli import main

    monkeypatch.setattr(sys, "argv", ["hostring", "demo", "--device", "cpu,cuda:99"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.err.startswith("hostring: there is no device 'cuda:99' here")
    assert "rank" not in said.out + said.err


REST: dict[str, Any] = {
    "prompts": (),
    "max_tokens": 4,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "seed": 0,
    "controls": True,
}


@pytest.mark.parametrize(
    ("ranks", "dtypes", "devices", "expected"),
    [
        (None, None, None, ()),
        (3, None, "cpu", ("cpu",) * 3),
        (None, "f32", "cpu, mps,cuda", ("cpu", "mps", "cuda")),
        (None, "f32,f16", "cuda:0,cuda:1", ("cuda:0", "cuda:1")),
        (1, None, "xpu", ("xpu",)),
    ],
)
def test_a_job_has_a_device_per_rank(
    ranks: int | None, dtypes: str | None, devices: str | None, expected: tuple[str, ...]
) -> None:
    job = make_job(model=None, ranks=ranks, dtypes=dtypes, devices=devices, **REST)
    assert job.devices == expected
    assert not expected or job.ranks == len(expected)
    assert Job.from_json(job.to_json()) == job


def test_devices_that_are_too_few_are_named() -> None:
    with pytest.raises(ValueError, match="2 devices for 3 ranks; name one for all, or one per rank"):
        make_job(model=None, ranks=None, dtypes="f32,f16,f32", devices="cpu,mps", **REST)


def _measured() -> tuple[dict[str, Any], str]:
    """What `hostring generate` does on two ranks, one of which finds an accelerator by itself; and what it shows."""
    job, shown = make_job(model=None, ranks=2, dtypes="f32", **REST), io.StringIO()
    with contextlib.redirect_stdout(shown):
        figures = in_threads(2, lambda comm: generate(job, comm, device=("cpu", "auto")[comm.rank]))[0]
    return figures, shown.getvalue()


def test_every_rank_takes_its_own_device_and_the_figures_say_so(worker: Callable[..., Any]) -> None:
    result, shown = worker(_measured)
    assert result["faults"] == []
    assert result["devices"] == [r["device"] for r in result["per_rank"]] == ["cpu", "fake"]
    assert len(set(result["activation_sha256"])) == 1
    alone = result["controls"]["one_rank"]
    assert [(c["rank"], c["dtype"], c["device"], c["tokens"]) for c in alone] == [
        (0, "float32", "cpu", result["tokens"]),
        (1, "float32", "fake", result["tokens"]),
    ]
    assert shown.count("rank 1 float32 fake") == 3
    assert "one rank alone in float32 cpu" in result["statement"]
    assert "communication and waiting" not in result["statement"]  # an accelerator's computing is in its waiting


def _command(figures: Path, *options: str) -> None:
    from hostring.commands.cli import main

    sys.argv = ["hostring", "generate", "--max-tokens", "2", "--no-stats", "--json", str(figures), *options]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()


@pytest.mark.parametrize(("options", "device"), [((), "fake"), (("--device", "cpu"), "cpu")])
def test_the_command_takes_the_accelerator_unless_told_otherwise(
    options: tuple[str, ...], device: str, tmp_path: Path, worker: Callable[..., Any]
) -> None:
    worker(_command, tmp_path / "out.json", *options)
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["devices"] == [device]
