"""Which files make up a checkpoint, and how many of their first bytes every rank needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hostring.integrations.llm.checkpoint.arriving import safetensors_lead
from hostring.integrations.llm.checkpoint.gguf_parts import part_paths, read_parts
from hostring.integrations.llm.checkpoint.json_file import read_optional_json
from hostring.integrations.llm.checkpoint.locate import find_gguf
from hostring.shipping.folder import ShippedFile

INDEX = "model.safetensors.index.json"
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    INDEX,
)
TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of a checkpoint in one folder.

    Attributes:
        opened: the file that is given to whoever opens it; empty for the folder itself.
    """

    folder: Path
    files: tuple[ShippedFile, ...]
    opened: str

    @property
    def paths(self) -> list[Path]:
        return [self.folder / file.name for file in self.files]


def files_of(path: str | Path) -> CheckpointFiles:
    """The files of the checkpoint at `path`.

    Raises:
        FileNotFoundError: nothing there. ValueError: a file that can't be read.
    """
    if (gguf := find_gguf(path)) is not None:
        parts = part_paths(gguf)
        starts = [file.stat().st_size for file in parts]
        for info in read_parts(gguf).tensors.values():
            starts[info.part] = min(starts[info.part], info.offset)
        found = [ShippedFile(file.name, file.stat().st_size, n) for file, n in zip(parts, starts, strict=True)]
        return CheckpointFiles(gguf.parent, tuple(found), gguf.name)
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    small = [folder / name for name in SMALL_FILES if (folder / name).is_file()]
    small += sorted((folder / TEMPLATES).glob("*.jinja"))
    leads = {file: file.stat().st_size for file in small} | {file: safetensors_lead(file) for file in _weights(path)}
    files = [ShippedFile(file.relative_to(folder).as_posix(), file.stat().st_size, n) for file, n in leads.items()]
    return CheckpointFiles(folder, tuple(files), "" if path.is_dir() else path.name)


def _weights(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    named = read_optional_json(path / INDEX).get("weight_map")
    if isinstance(named, dict):
        return sorted({path / str(name) for name in named.values()})
    usual = path / "model.safetensors"
    return [usual] if usual.exists() else sorted(path.glob("*.safetensors"))
