"""The small messages of start-up: bounded, of their own types, and with proofs that fit nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from hostring.store.protocol import checked_nbytes, framed, pack, prove, proves, typed, typed_fields, unpack


def test_lengths_are_checked_before_they_are_believed() -> None:
    assert framed(b"abc") == b"\x03\0\0\0abc"
    assert checked_nbytes(b"\x03\0\0\0", 3) == 3
    with pytest.raises(ValueError, match="4294967295 bytes was announced, the limit is 4096"):
        checked_nbytes(b"\xff\xff\xff\xff", 4096)
    with pytest.raises(ValueError, match="can't be put into a message"):
        pack({"x": object()}, 100)
    with pytest.raises(ValueError, match="not a message of hostring"):
        unpack(b"\xc1")


def test_fields_are_of_their_own_type_and_never_converted() -> None:
    assert typed([b"a", 5], 1, int) == 5
    for packed, key, kind, message in (
        ([b"a", 5], 0, int, "0 is no int"),
        ([b"a", True], 1, int, "1 is no int"),
        ({"n": 10**9}, "n", bytes, "'n' is no bytes"),
        ([b"a"], 1, int, "1 is missing"),
        ({}, "n", int, "'n' is missing"),
        (None, "n", int, "'n' is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            typed(packed, key, kind)
    kinds: dict[str, Any] = {"n": int, "names": [str]}
    assert typed_fields({"n": 5, "names": ["a"], "more": 1}, kinds) == {"n": 5, "names": ["a"]}
    for packed, message in (
        ({"n": "5", "names": []}, "'n' is no int"),
        ({"names": []}, "'n' is missing"),
        ({"n": 5, "names": "a"}, "'names' is no list of str"),
        ({"n": 5, "names": ["a", 1]}, "'names' is no list of str"),
        ([5, []], "not a dict of fields"),
    ):
        with pytest.raises(ValueError, match=message):
            typed_fields(packed, kinds)


def test_proofs_bind_role_parts_and_secret() -> None:
    proof = prove(b"s", "dialer", b"ab", b"c")
    assert proves(proof, b"s", "dialer", b"ab", b"c")
    for secret, role, *parts in (
        (b"t", "dialer", b"ab", b"c"),
        (b"s", "acceptor", b"ab", b"c"),
        (b"s", "dialer", b"a", b"bc"),
    ):
        assert not proves(proof, secret, role, *parts)
    assert not proves(None, b"s", "dialer")
    assert not proves("text", b"s", "dialer")
