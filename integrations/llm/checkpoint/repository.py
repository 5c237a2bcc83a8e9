"""A model named by its Hugging Face repository: its files, from the hub's cache on this machine or from the hub."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hostring.integrations.llm.checkpoint.gguf_parts import only_first
from hostring.integrations.llm.checkpoint.json_file import read_optional_json
from hostring.integrations.llm.checkpoint.shipped_files import INDEX, SMALL_FILES, TEMPLATES

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(/(?P<file>[^/].*\.gguf))?")
_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+)--(?P<name>[^/]+)")
_FORMS = (
    "give a GGUF file, a directory with config.json and *.safetensors, or a Hugging Face repository such as org/name"
)
_WEIGHTS = ("*.safetensors", INDEX)


def find_model(text: str | Path) -> Path:
    """Where the model is that a user names: a path, or "org/name" or "org/name/file.gguf" of a repository.

    Only the files that are needed are downloaded, and none when the hub's cache has them.

    Raises:
        FileNotFoundError: neither a path nor a repository.
        ModuleNotFoundError: it is a repository, and huggingface_hub is not installed.
        ValueError: the repository has no model that can be read, or several.
        OSError: the hub can't be reached.
    """
    path, named = Path(text), _NAME.fullmatch(str(text))
    if path.exists():
        return path
    if named is None or str(text).startswith((".", "/")):
        raise FileNotFoundError(f"no model at {path}; {_FORMS}")
    try:
        import huggingface_hub  # noqa: F401
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"no model at {path}, and a repository needs huggingface_hub: pip install 'hostring[llm]'"
        ) from None
    return _cached(named["repo"], named["file"]) or _downloaded(named["repo"], named["file"])


def model_name(path: Path) -> str:
    """What to call a model: its repository, or the name of its file or folder."""
    for parent in (path, *path.parents):
        if (found := _SNAPSHOT.fullmatch(parent.name)) is not None:
            return f"{found['owner']}/{found['name']}"
    return path.stem if path.suffix == ".gguf" else path.name


def _cached(repo: str, file: str | None) -> Path | None:
    """The model in the hub's cache, where all its files are there."""
    from huggingface_hub import constants

    home = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    ref = home / "refs" / "main"
    if not ref.exists():
        return None
    folder = home / "snapshots" / ref.read_text(encoding="utf-8").strip()
    if file is not None:
        return folder / file if (folder / file).exists() else None
    names = [one.relative_to(folder).as_posix() for one in folder.rglob("*") if one.is_file()]
    weights = read_optional_json(folder / INDEX).get("weight_map")
    needed = {str(name) for name in weights.values()} if isinstance(weights, dict) else {"model.safetensors"}
    if {"config.json", "tokenizer.json"} <= set(names) and needed <= set(names):
        return folder
    ggufs = only_first([folder / name for name in names if name.endswith(".gguf")])
    return ggufs[0] if len(ggufs) == 1 and "config.json" not in names else None


def _downloaded(repo: str, file: str | None) -> Path:
    """The model from the hub; the rest of the repository stays there."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    endpoint: Any = {"endpoint": os.environ.get("HF_ENDPOINT")}
    try:
        names = HfApi(**endpoint).list_repo_files(repo)
        wanted = _wanted(repo, names, file)
        folder = Path(snapshot_download(repo, allow_patterns=[*wanted], **endpoint))
    except RepositoryNotFoundError as exc:
        raise FileNotFoundError(
            f"no model at {repo}: no such path, and no such repository on the hub (or one that "
            f"needs a login: hf auth login); {_FORMS}"
        ) from exc
    except (HfHubHTTPError, OSError) as exc:
        raise OSError(f"the hub did not give {repo}, and its files are not all in the cache: {exc}") from exc
    first = [name for name in wanted if name.endswith(".gguf")]
    return folder / first[0] if first else folder


def _wanted(repo: str, names: Sequence[str], file: str | None) -> list[str]:
    """Which files make up the model."""
    if file is None and "config.json" in names and any(fnmatch.fnmatch(name, _WEIGHTS[0]) for name in names):
        weights = [name for name in names if "/" not in name and any(fnmatch.fnmatch(name, one) for one in _WEIGHTS)]
        if INDEX not in names and "model.safetensors" in names:
            weights = ["model.safetensors"]
        return [*weights, *(name for name in names if name in SMALL_FILES or name.startswith(f"{TEMPLATES}/"))]
    ggufs = [name for name in names if name.lower().endswith(".gguf") and "mmproj" not in name.lower()]
    first = [str(path) for path in only_first([Path(name) for name in ggufs])]
    chosen = first if file is None else [name for name in ggufs if name == file]
    if not chosen:
        what = "no model in safetensors or GGUF" if file is None else f"no {file}; it has {', '.join(first) or 'none'}"
        raise ValueError(f"the repository {repo} has {what}")
    if len(chosen) > 1:
        raise ValueError(
            f"the repository {repo} has {len(chosen)} models; name one: {repo}/{chosen[0]}, or one of "
            f"{', '.join(chosen[1:])}"
        )
    parts = re.sub(r"-\d{5}-of-(\d{5}\.gguf)$", r"-?????-of-\1", chosen[0])
    return [chosen[0], *sorted(name for name in ggufs if fnmatch.fnmatch(name, parts) and name != chosen[0])]
