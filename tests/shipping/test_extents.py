"""Which bytes an extent means, piece by piece, against a set of their indices."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hostring.shipping.extents import Extent, without_contained

MAX_NBYTES = 512  # of a piece


def indices(extent: Extent) -> set[int]:
    return {extent.offset + n * extent.stride + k for n in range(extent.count) for k in range(extent.width)}


extents = st.builds(
    lambda offset, width, gap, count: Extent(0, offset, width, width + gap if count > 1 else 0, count),
    st.integers(0, 900), st.integers(1, 600), st.integers(1, 50), st.integers(1, 12),
)  # fmt: skip


@given(extents)
def test_pieces_are_the_same_bytes(extent: Extent) -> None:
    pieces = extent.pieces(MAX_NBYTES)
    found = [i for piece in pieces for i in indices(piece)]
    assert len(found) == len(set(found)) == extent.nbytes
    assert set(found) == indices(extent)
    assert all(piece.nbytes <= MAX_NBYTES for piece in pieces)
    assert max(found) + 1 == extent.end


@given(extents, extents)
def test_what_is_contained_is_so_byte_by_byte(one: Extent, other: Extent) -> None:
    if one.contains(other):
        assert indices(other) <= indices(one)
    assert one.contains(one)
    assert set().union(*map(indices, without_contained([one, other]))) == indices(one) | indices(other)


def test_a_part_of_a_cut_through_a_matrix_is_contained() -> None:
    rows = Extent.of_matrix(0, 1000, 64, range(3, 20), 16, 48)
    assert rows.contains(Extent.of_matrix(0, 1000, 64, range(4, 9), 20, 40))
    assert not rows.contains(Extent.of_matrix(0, 1000, 64, range(4, 9), 20, 50))
    assert not rows.contains(Extent.of_matrix(0, 1000, 64, range(4, 21), 20, 40))
    assert Extent.of_matrix(0, 1000, 64, range(3, 20), 0, 64) == Extent(0, 1000 + 3 * 64, 17 * 64)
