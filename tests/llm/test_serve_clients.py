"""Programs that people point at an OpenAI-compatible server: litellm, llm, lm-eval and Vercel's AI SDK.

Last run with litellm 1.110.2, llm 0.36, lm-eval 0.4.13, and ai 6.0.326
with @ai-sdk/openai-compatible 2.0.92 on node 20.20.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from demo_jobs import PROMPTS
from serving_ranks import ask, served

from hostring.integrations.llm.demo.job import BUNDLED
from hostring.integrations.llm.serve.serving import Serving

pytestmark = pytest.mark.slow

PACKAGES = os.environ.get("HOSTRING_TEST_NODE_PACKAGES", "")  # a folder where npm has installed ai and @ai-sdk/...
LIMIT_S = 240.0
MESSAGES = [{"role": "user", "content": PROMPTS[0]}]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with served(streams=4) as serving:
        yield serving


@pytest.fixture(scope="module")
def text(server: Serving) -> str:
    """What the chat answers greedily."""
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 16}
    return str(ask(f"{server.url}/v1/chat/completions", body)[1]["choices"][0]["message"]["content"])


def run(command: list[str], **env: str) -> str:
    """What a command writes to standard output."""
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **env}, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.filterwarnings("ignore")  # of litellm's own dependencies
def test_litellm(server: Serving, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask another host
    litellm: Any = pytest.importorskip("litellm", reason="litellm is not installed")
    how: Any = {"model": "openai/tiny", "api_base": f"{server.url}/v1", "api_key": "none", "messages": MESSAGES}
    how |= {"temperature": 0, "max_tokens": 16}
    whole = litellm.completion(**how)
    assert whole.choices[0].message.content == text
    assert whole.usage.completion_tokens == 16
    pieces = litellm.completion(**how, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**{**how, "temperature": 9})


def test_llm(server: Serving, text: str, tmp_path: Path) -> None:
    if find_spec("llm") is None:
        pytest.skip("llm is not installed")
    models = [{"model_id": "ours", "model_name": "tiny", "api_base": f"{server.url}/v1", "api_key_name": "none"}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models), encoding="utf-8")
    (tmp_path / "keys.json").write_text(json.dumps({"none": "none"}), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "llm",
        "-m",
        "ours",
        "-o",
        "temperature",
        "0",
        "-o",
        "max_tokens",
        "16",
        PROMPTS[0],
    ]
    for how in ([], ["--no-stream"]):
        assert run([*command, *how], LLM_USER_PATH=str(tmp_path)) == f"{text}\n"


@pytest.mark.timeout(LIMIT_S)
def test_lm_eval(server: Serving, tmp_path: Path) -> None:
    """A task with choices, by probabilities, and one that generates. The first one's result is known."""
    if find_spec("lm_eval") is None:
        pytest.skip("lm-eval is not installed")
    rows = [
        {"question": "And God said, Let there be", "good": " light", "bad": " zzxqj"},
        {"question": "In the beginning God created the", "good": " heaven", "bad": " qqvvk"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}}
    chooses = {**data, "task": "ours_choose", "test_split": "test", "output_type": "multiple_choice"}
    chooses |= {"doc_to_text": "{{question}}", "doc_to_choice": "{{[good, bad]}}", "doc_to_target": 0}
    chooses |= {"target_delimiter": "", "metric_list": [{"metric": "acc"}]}
    writes = {**data, "task": "ours_write", "test_split": "test", "output_type": "generate_until"}
    writes |= {"doc_to_text": "{{question}}", "doc_to_target": "{{good}}", "metric_list": [{"metric": "exact_match"}]}
    writes |= {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 4}}
    for task in (chooses, writes):
        (tmp_path / f"{task['task']}.yaml").write_text(json.dumps(task), encoding="utf-8")
    model = f"model=tiny,base_url={server.url}/v1/completions,num_concurrent=1,max_retries=1"
    model += f",tokenizer_backend=huggingface,tokenizer={BUNDLED}"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", model, "--tasks"]
    command += ["ours_choose,ours_write", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "OPENAI_API_KEY": "none"}
    run(command, **offline)
    (found,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(found.read_text(encoding="utf-8"))["results"]
    assert results["ours_choose"]["acc,none"] == 1.0
    assert not math.isnan(results["ours_write"]["exact_match,none"])


AI_SDK = """
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
const [baseURL, prompt] = process.argv.slice(1);
const model = createOpenAICompatible({ name: "ours", baseURL, includeUsage: true })("tiny");
const how = { model, prompt, temperature: 0, maxOutputTokens: 16, maxRetries: 0 };
const whole = await generateText(how);
const streamed = streamText(how);
let text = "";
for await (const piece of streamed.textStream) text += piece;
const usage = await streamed.usage;
console.log(JSON.stringify({ whole: whole.text, text, reason: whole.finishReason, tokens: usage.outputTokens }));
"""


def test_ai_sdk(server: Serving, text: str) -> None:
    node = shutil.which("node")
    if node is None or not PACKAGES:
        pytest.skip("needs node, and HOSTRING_TEST_NODE_PACKAGES: a folder with ai and @ai-sdk/openai-compatible")
    command = [node, "--input-type=module", "-e", AI_SDK, f"{server.url}/v1", PROMPTS[0]]
    found = subprocess.run(
        command, cwd=PACKAGES, capture_output=True, text=True, timeout=LIMIT_S, check=False, encoding="utf-8"
    )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == {"whole": text, "text": text, "reason": "length", "tokens": 16}
