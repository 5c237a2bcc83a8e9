"""Ranks of one MPI job find rank 0 through a file that nobody else can read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hostring.store import job_file


def test_the_meeting_file_is_for_this_user_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(LookupError):
        job_file.find("job")
    path = job_file.publish("job", ("127.0.0.1", 5), b"secret")
    assert job_file.find("job") == (("127.0.0.1", 5), b"secret")
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
    assert os.listdir(os.path.dirname(path)) == ["job.json"]

    Path(path).write_text("{", encoding="utf-8")
    with pytest.raises(LookupError, match="can't be read"):
        job_file.find("job")
    os.chmod(path, 0o644)
    with pytest.raises(PermissionError, match="must belong to this user alone"):
        job_file.find("job")
    os.unlink(path)
    os.symlink("/dev/null", path)
    with pytest.raises(OSError, match=r"job\.json"):
        job_file.find("job")
    os.chmod(os.path.dirname(path), 0o777)
    with pytest.raises(PermissionError, match="must belong to this user alone"):
        job_file.publish("job", ("127.0.0.1", 5), b"secret")
