"""Build a graph by hand, print it, plan it, run it, and compare the result with the exact reference."""

import numpy as np

import hocket
from hocket import ops

# Shapes are as in NumPy; weights are [rows, columns], as in a GGUF file.
x = hocket.input("x", (3, 64))
up = hocket.weight("up", (256, 64))
gate = hocket.weight("gate", (256, 64))
down = hocket.weight("down", (64, 256))

h = ops.rms_norm(x, eps=1e-6, name="norm")
h = ops.swiglu(ops.mul_mat(gate, h), ops.mul_mat(up, h), name="hidden")
y = ops.add(x, ops.mul_mat(down, h), name="residual")
graph = hocket.Graph({"y": y})

print(graph)  # one line per node; hocket.parse reads it back
assert hocket.parse(str(graph)).digest() == graph.digest()

# A plan is data: the kernels in order, with the bytes that they use. `load` allocates the memory.
plan = hocket.plan(graph, "cpu:0")
print(plan.explain(), "\n")

rng = np.random.default_rng(0)
weights = {v.node.name: rng.standard_normal(v.shape).astype(np.float32) / 8 for v in graph.weights}
data = rng.standard_normal(x.shape).astype(np.float32)
result = hocket.load(plan, weights).run({"x": data})["y"]

exact, _ = ops.evaluate(graph, {**weights, "x": data})
error = np.square(result - exact["y"]).sum() / np.square(exact["y"]).sum()
print(f"normalised mean square error against float64: {error:.1e}")
assert error < 1e-12

# An error names the node, the value found, and the value needed.
try:
    ops.mul_mat(down, x)
except hocket.GraphError as why:
    print(why)
