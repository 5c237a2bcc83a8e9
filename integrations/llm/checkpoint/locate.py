"""What a path given by a user means: a GGUF file, or a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

from hostring.integrations.llm.checkpoint.gguf_parts import only_first

_FORMS = "give a GGUF file or a directory with config.json and *.safetensors"


def find_gguf(path: str | Path) -> Path | None:
    """The GGUF file that is meant: the file itself, or the only one in a directory without safetensors, or the first of
    the parts of one model in such a directory. Otherwise None.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: an empty file, a file of another kind, or a directory with several GGUF files.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no model at {path}; {_FORMS}")
    if path.is_dir():
        return _only_gguf(path)
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty (0 bytes); download it again")
    if path.suffix.lower() == ".gguf":
        return path
    with path.open("rb") as file:
        if file.read(4) == b"GGUF":
            return path
    if path.suffix.lower() != ".safetensors":
        raise ValueError(f"{path} is neither a GGUF file nor a .safetensors file; {_FORMS}")
    return None


def _only_gguf(directory: Path) -> Path | None:
    there = sorted(file for file in directory.iterdir() if file.suffix.lower() == ".gguf" and file.is_file())
    found = only_first(there)
    if not found or any(directory.glob("*.safetensors")):
        return None
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:4]) + (", ..." if len(found) > 4 else "")
        raise ValueError(f"{directory} holds {len(found)} GGUF files ({names}); name one of them")
    return found[0]
