"""A gated delta net with its state in the graph: single tokens give the same results as one batch."""

import numpy as np

import hocket
from hocket import ops

KEY_HEADS, VALUE_HEADS, SIZE = 2, 4, 16


def build_layer(tokens: int) -> hocket.Graph:
    """Build one recurrent layer over `tokens` tokens; each run starts from the state that the previous run left."""
    q, k = (hocket.input(name, (tokens, KEY_HEADS, SIZE)) for name in "qk")
    v = hocket.input("v", (tokens, VALUE_HEADS, SIZE))
    decay = hocket.input("decay", (tokens, VALUE_HEADS, 1))
    beta = hocket.input("beta", (tokens, VALUE_HEADS))
    state = hocket.state("S", (VALUE_HEADS, SIZE, SIZE))
    q, k = ops.l2_norm(q), ops.l2_norm(k)
    out, new_state = ops.gated_delta_net(q, k, v, decay, ops.sigmoid(beta), state, heads="tiled")
    return hocket.Graph({"out": out}, updates={state: new_state})


rng = np.random.default_rng(0)
T = 12
feed = {v.node.name: rng.standard_normal(v.shape).astype(np.float32) for v in build_layer(T).inputs}
feed["decay"] = -np.exp(feed["decay"])  # logarithms of factors below one

whole = hocket.load(hocket.plan(build_layer(T)), {})
at_once = whole.run(feed)["out"]

single = hocket.load(hocket.plan(build_layer(1)), {})
print(single.plan.explain(), "\n")  # the update is written in place, without a copy of the state
one_by_one = np.concatenate([single.run({name: a[t : t + 1] for name, a in feed.items()})["out"] for t in range(T)])

difference = np.abs(at_once - one_by_one).max()
print(f"{T} tokens at once or one by one: largest difference {difference:.1e}")
assert difference < 1e-5
assert np.allclose(whole.store.state("S"), single.store.state("S"), atol=1e-5)
