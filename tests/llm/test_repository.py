"""Models by the name of their repository, from a hub that this test is."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest
from huggingface_hub import close_session

from hostring.integrations.llm.checkpoint.repository import find_model, model_name
from hostring.integrations.llm.demo.job import BUNDLED, make_job

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TINY = {file.name: file.read_bytes() for file in BUNDLED.iterdir()}
REPOSITORIES: dict[str, dict[str, bytes]] = {
    "org/tiny": {**TINY, "pytorch_model.bin": b"no", "onnx/model.onnx": b"no"},
    "org/one": {"README.md": b"no", "m.Q8_0.gguf": b"GGUF one", "mmproj-m.gguf": b"no"},
    "org/several": {"m.Q8_0.gguf": b"GGUF 8", "m.Q4_0.gguf": b"GGUF 4", "config.json": b"{}"},
    "org/parts": {f"m-0000{n}-of-00002.gguf": b"GGUF %d" % n for n in (1, 2)},
    "org/none": {"README.md": b"no"},
}


class Hub:
    """What a hub answers, and what it was asked for."""

    def __init__(self) -> None:
        self.downloaded: list[str] = []

    def answer(self, path: str) -> tuple[dict[str, str], bytes] | None:
        words = [unquote(word) for word in path.strip("/").split("/")]
        if words[:2] == ["api", "models"]:
            repo, files = "/".join(words[2:4]), REPOSITORIES.get("/".join(words[2:4]))
            if files is None:
                return None
            if "tree" in words:
                rows = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in files.items()]
                return {"Content-Type": "application/json"}, json.dumps(rows).encode()
            about = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            return {"Content-Type": "application/json"}, json.dumps(about).encode()
        repo, name = "/".join(words[:2]), "/".join(words[4:])
        if words[2:3] != ["resolve"] or name not in REPOSITORIES.get(repo, {}):
            return None
        data = REPOSITORIES[repo][name]
        return {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}, data


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    found = Hub()

    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            answer = found.answer(path)
            headers, data = answer or ({"X-Error-Code": "RepoNotFound"}, b"")
            self.send_response(200 if answer else 401)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                if "/resolve/" in path:
                    found.downloaded.append(path.rpartition(f"{COMMIT}/")[2])
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        close_session()  # it may be one to the real hub
        yield found
        close_session()
        server.shutdown()
        thread.join(10)


def test_only_the_files_of_the_model_come_and_only_once(hub: Hub) -> None:
    job = make_job(
        model="org/tiny", ranks=2, dtypes=None, prompts=(), max_tokens=1, temperature=0.0, top_k=0, top_p=1.0, seed=0,
        controls=False,
    )  # fmt: skip
    there = Path(job.model)
    assert (there / "model.safetensors").read_bytes() == TINY["model.safetensors"]
    assert sorted(hub.downloaded) == sorted(set(TINY) - {"README.md"})
    assert model_name(there) == "org/tiny"
    hub.answer = lambda path: None  # type: ignore[method-assign]
    assert find_model("org/tiny") == there


@pytest.mark.parametrize(
    ("named", "file", "came"),
    [
        ("org/one", "m.Q8_0.gguf", ["m.Q8_0.gguf"]),
        ("org/several/m.Q4_0.gguf", "m.Q4_0.gguf", ["m.Q4_0.gguf"]),
        ("org/parts", "m-00001-of-00002.gguf", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]),
    ],
)
def test_gguf_files_of_a_repository(hub: Hub, named: str, file: str, came: list[str]) -> None:
    there = find_model(named)
    assert there.name == file
    assert there.read_bytes().startswith(b"GGUF")
    assert sorted(hub.downloaded) == came
    hub.answer = lambda path: None  # type: ignore[method-assign]
    assert find_model(named) == there


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("org/several", r"has 2 models; name one: org/several/m\.Q8_0\.gguf, or one of m\.Q4_0\.gguf"),
        ("org/several/m.Q5_0.gguf", r"has no m\.Q5_0\.gguf; it has m\.Q8_0\.gguf, m\.Q4_0\.gguf"),
        ("org/none", "has no model in safetensors or GGUF"),
        ("org/unknown", "no model at org/unknown: no such path, and no such repository"),
        ("./org/tiny", "no model at"),
        ("nothing", "no model at nothing; give a GGUF file"),
    ],
)
def test_what_is_no_model_is_refused_with_the_reason(hub: Hub, named: str, why: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=why):
        find_model(named)
    assert hub.downloaded == []
