"""With --same-bits a request gets the same text in any company."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from llm_models import byte_tokenizer, packable_model, write_gguf
from serving_ranks import ask, served

from hostring.integrations.llm.packed.library import Unavailable, load
from hostring.integrations.llm.serve import scheduler
from hostring.integrations.llm.serve.serving import Serving

PROMPT = "the water is wide, and I can't get over, and neither have I wings to fly"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from gguf import GGMLQuantizationType

    try:
        load()
    except Unavailable as exc:
        pytest.skip(str(exc))
    folder = tmp_path_factory.mktemp("serve")
    return write_gguf(packable_model("qwen3", 4, 64), folder / "m.gguf", GGMLQuantizationType.Q4_1, byte_tokenizer(400))


def text(serving: Serving, prompt: str = PROMPT, **changes: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 12, "seed": 5, "ignore_eos": True, "temperature": 0.8, **changes}
    status, found, _ = ask(f"{serving.url}/v1/completions", body)
    assert status == 200, found
    return str(found["choices"][0]["text"])


def test_a_text_does_not_depend_on_company_cache_or_chunks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, beside others, with a warm cache, with a prompt in small parts, on one rank, three, and two stages."""
    how = {"model": str(path), "same_bits": True}
    found: set[str] = set()
    for ranks, stages in ((1, ()), (3, ()), (2, ((1, 1), (1, 1)))):
        with served(("float32",) * ranks, how={**how, "stages": stages}, streams=8, context=256) as serving:
            found.add(text(serving))
            found.add(text(serving))  # the cache is warm
            with ThreadPoolExecutor(8) as pool:
                others = [pool.submit(text, serving, f"{n} ships in a row", temperature=0) for n in range(7)]
                found.add(text(serving))
                assert all(other.result() for other in others)
    with served(("float32",) * 2, how=how, streams=2, context=256) as serving:
        chunks: list[int] = []

        def budget(pace: object, writing: int, start: int) -> int:
            chunks.append(writing)
            return 7

        monkeypatch.setattr(scheduler.PrefillPace, "budget", budget)
        found.add(text(serving))
        assert len(chunks) > len(PROMPT) // 7
    assert len(found) == 1, found
