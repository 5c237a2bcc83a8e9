"""Training states as bytes: the same on every rank, back as they were, and nothing executed."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest

from hostring.arrays.dtypes import BFLOAT16
from hostring.training import digest, pack, unpack

torch = pytest.importorskip("torch")


def test_a_state_comes_back():
    state = {
        "step": 7,
        "done": False,
        "name": "inner",
        "none": None,
        "rate": 0.1,
        "state": {3: {"mean": np.arange(6, dtype=np.float64).reshape(2, 3).T}, 0: {"mean": np.zeros((), np.int16)}},
        "groups": [{"betas": (0.9, 0.999)}, b"raw"],
        "narrow": np.array([1.5, -2.0], BFLOAT16),
    }
    back = unpack(pack(state))
    assert back["state"][3]["mean"].dtype == np.float64
    np.testing.assert_array_equal(back["state"][3]["mean"], state["state"][3]["mean"])
    assert back["state"][0]["mean"].shape == ()
    assert back["groups"] == [{"betas": [0.9, 0.999]}, b"raw"]
    assert back["narrow"].dtype == BFLOAT16
    assert back["narrow"].tolist() == [1.5, -2.0]
    assert {key: back[key] for key in ("step", "done", "name", "none", "rate")} == {
        key: state[key] for key in ("step", "done", "name", "none", "rate")
    }
    assert digest(back) == digest(state)


def test_the_order_of_keys_and_strides_do_not_matter_and_one_bit_does():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    one, other = {"a": x, "b": 1}, {"b": 1, "a": np.asfortranarray(x)}
    assert digest(one) == digest(other) == digest({"a": torch.from_numpy(x), "b": 1})
    changed = x.copy()
    changed[1, 2] = np.nextafter(changed[1, 2], np.float32(9))
    assert digest({"a": changed, "b": 1}) != digest(one)
    assert digest({"a": x.astype(np.float64), "b": 1}) != digest(one)
    assert digest({"a": x.reshape(3, 2), "b": 1}) != digest(one)


def test_a_torch_optimiser_goes_on_from_it():
    def made():
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        return net, torch.optim.AdamW(net.parameters(), lr=0.1)

    def train(net, optimizer):
        optimizer.zero_grad()
        net(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()

    net, optimizer = made()
    train(net, optimizer)
    data = pack({"net": net.state_dict(), "optimizer": optimizer.state_dict()})
    again, second = made()
    state = unpack(data, torch.from_numpy)
    again.load_state_dict(state["net"])
    second.load_state_dict(state["optimizer"])
    for both in ((net, optimizer), (again, second)):
        train(*both)
    assert digest(again.state_dict()) == digest(net.state_dict())
    assert digest(second.state_dict()) == digest(optimizer.state_dict())


@pytest.mark.parametrize(
    ("state", "words"),
    [({"f": print}, "can't hold <built-in"), ({(1, 2): 3}, r"key \(1, 2\)"), ({True: 3}, "key True")],
    ids=["function", "tuple", "bool"],
)
def test_what_is_refused(state, words):
    with pytest.raises(TypeError, match=words):
        pack(state)


def test_an_unknown_kind_of_data_is_refused():
    with pytest.raises(ValueError, match="unknown kind 9"):
        unpack(msgpack.packb({"x": msgpack.ExtType(9, b"")}))
