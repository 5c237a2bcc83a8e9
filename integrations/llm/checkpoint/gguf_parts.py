"""A GGUF model on disk: one file, or the parts into which llama.cpp's `gguf-split` has cut it.

Each part is a GGUF file of its own. The first has the metadata of the model, all have some of its tensors, and their
names end in `-00001-of-00003.gguf`.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hostring.integrations.llm.checkpoint.gguf_experts import experts_apart
from hostring.integrations.llm.checkpoint.gguf_header import TensorInfo, map_file, read_header

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True)
class GgufParts:
    """A model's files, mapped.

    Attributes:
        fields: the metadata.
        tensors: where each tensor lies: in which file, and where in it. Each expert has tensors of its own.
        mapped: the files, in the order of their parts.
    """

    fields: dict[str, Any]
    tensors: dict[str, TensorInfo]
    mapped: tuple[mmap.mmap, ...]


def read_parts(path: Path) -> GgufParts:
    """Map the file at `path` and, where it is a part of a model, all other parts.

    Raises:
        FileNotFoundError: a part is missing.
        ValueError: a file that can't be read, or parts that don't belong together.
    """
    data = map_file(path)
    fields, tensors = read_header(path, data)
    if _count(path, fields) == 1:
        return GgufParts(fields, experts_apart(tensors), (data,))
    paths = _paths(path, fields)
    mapped = tuple(map_file(part) for part in paths)
    headers = [read_header(part, data) for part, data in zip(paths, mapped, strict=True)]
    found: dict[str, TensorInfo] = {}
    for n, (part, (said, there)) in enumerate(zip(paths, headers, strict=True)):
        if (_count(part, said), said.get("split.no")) != (len(paths), n):
            raise ValueError(
                f"{part}: split.no and split.count are {said.get('split.no')} and {said.get('split.count')}; its name "
                f"says that they are {n} and {len(paths)}"
            )
        if twice := sorted(found.keys() & there.keys()):
            raise ValueError(f"{part} has the tensor {twice[0]}, which another part has too")
        found.update((name, replace(info, part=n)) for name, info in there.items())
    total = headers[0][0].get("split.tensors.count", len(found))
    if total != len(found):
        raise ValueError(
            f"{path}: split.tensors.count is {total}, and the {len(paths)} parts have {len(found)} tensors"
        )
    return GgufParts(headers[0][0], experts_apart(found), mapped)


def part_paths(path: Path) -> list[Path]:
    """The files of the model that the file at `path` is, or is a part of.

    Raises:
        FileNotFoundError: a part is missing. ValueError: a file that can't be read.
    """
    with map_file(path) as data:
        fields, _ = read_header(path, data)
    return [path] if _count(path, fields) == 1 else _paths(path, fields)


def read_fields(path: Path) -> dict[str, Any]:
    """The metadata of the model that the file at `path` is, or is a part of.

    Raises:
        FileNotFoundError: the part that has the metadata is missing.
        ValueError: a file that can't be read.
    """
    with map_file(path) as data:
        fields, _ = read_header(path, data)
    if _count(path, fields) == 1 or fields.get("split.no") == 0:
        return fields
    first = _paths(path, fields)[0]
    with map_file(first) as data:
        return read_header(first, data)[0]


def only_first(paths: list[Path]) -> list[Path]:
    """The same paths, without those of parts of a model whose first part is among them."""

    def follows(path: Path) -> bool:
        found = _NAME.fullmatch(path.name)
        return found is not None and path.with_name(_name(found, 1)) in paths and int(found["number"]) > 1

    return [path for path in paths if not follows(path)]


def _count(path: Path, fields: Mapping[str, Any]) -> int:
    count = fields.get("split.count", 0)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"{path}: split.count is {count!r}; expected a number of parts")
    return max(1, count)


def _paths(path: Path, fields: Mapping[str, Any]) -> list[Path]:
    """All parts of the model that has the part at `path`."""
    count, number = _count(path, fields), fields.get("split.no")
    found = _NAME.fullmatch(path.name)
    if found is None or int(found["count"]) != count:
        raise ValueError(
            f"{path} is part {number} (from 0) of {count} of a model, and its name doesn't end in "
            f"-NNNNN-of-{count:05}.gguf, so the other parts can't be found; give the files the names that they had, or "
            "join them with llama.cpp's `gguf-split --merge`"
        )
    paths = [path.with_name(_name(found, n)) for n in range(1, count + 1)]
    absent = [part.name for part in paths if not part.exists()]
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise FileNotFoundError(
            f"{path} is one of {count} parts of a model, and {absent[0]}{more} is not in {path.parent}; download it too"
        )
    return paths


def _name(found: re.Match[str], number: int) -> str:
    end = found.string[found.end("count") :]
    return f"{found['stem']}-{number:05}-of-{found['count']}{end}"
