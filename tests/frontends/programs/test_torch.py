"""PyTorch programs: rows of the table against PyTorch itself, whole models on several devices, refusals."""

from __future__ import annotations

import importlib.util
import json
import zipfile

import numpy as np
import pytest

import hocket
from hocket.frontends.errors import ModelError

from ...given.tensors import encoder_layer, nmse

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's own, of its own deprecations
]


def rows_cases():
    """By name: a function of x [2, 3, 8, 8], m [4, 6], i (integers [4, 6]) and t (truth values [4, 6])."""
    import torch
    from torch.nn import functional as F

    w = torch.randn(6, 3, 3, 3)
    narrow, grouped, transposed = torch.randn(5, 6, 3), torch.randn(6, 1, 3, 3), torch.randn(3, 2, 3, 3)
    ids = torch.tensor([[0, 3, 1], [2, 2, 0]])
    table = torch.randn(8, 5)
    return {
        "numbers": lambda x, m, i, t: (m + 1) * 2 - 3 / (m.abs() + 1) + (1 - m) + m % 0.75,
        "powers": lambda x, m, i, t: m**2 + m**3 + m.abs() ** 0.5 + (m.abs() + 1) ** -0.5 + (m.abs() + 1) ** 1.3,
        "broadcast": lambda x, m, i, t: x[:, :1] + x[:, :, :1] * x[0] - x[:1, :1, :1, :1],
        "smooth": lambda x, m, i, t: m.exp() + m.expm1() + m.sin() + m.cos() + m.tanh() + m.erf() + m.sigmoid(),
        "logarithms": lambda x, m, i, t: m.abs().log1p() + (m.abs() + 0.5).log() + (m.abs() + 1).log2(),
        "activations": lambda x, m, i, t: F.gelu(m) + F.gelu(m, approximate="tanh") + F.silu(m) + F.elu(m) + F.mish(m),
        "softplus": lambda x, m, i, t: F.softplus(m, 2.0, 3.0) + F.hardswish(m) + F.leaky_relu(m, 0.2) + F.relu6(m),
        "rounding": lambda x, m, i, t: (2 * m).round() + m.floor() + m.ceil() + m.trunc() + (i / 2).round(),
        "clamp": lambda x, m, i, t: m.clamp(-0.5, 0.5) + m.clamp(min=0) + i.clamp(max=3),
        "integers": lambda x, m, i, t: (
            (i * 3 - 7) // 4 + (i - 5) % 3 + (2 * i) ** 2 - torch.div(i - 9, 4, rounding_mode="trunc")
        ),
        "bits": lambda x, m, i, t: (i & 6) | (i ^ 3),
        "truths": lambda x, m, i, t: (t & (m > 0)) | ~(i == 3) ^ (m <= i),
        "where": lambda x, m, i, t: torch.where(t, m, -torch.inf).masked_fill(m < -1, 7.0),
        "not a number": lambda x, m, i, t: (m / torch.zeros_like(m)).isinf() | (m.log()).isnan(),
        "sums": lambda x, m, i, t: x.sum((1, 3)) + x.mean(1)[..., 0] + x.var(-1)[:, 0] + x.std((1, 2), unbiased=False),
        "counts": lambda x, m, i, t: i.sum(0) + t.sum(0) + i.cumsum(0)[1] + t.cumsum(1)[0] + i.prod(0),
        "extremes": lambda x, m, i, t: x.amax((0, 2)) - x.amin(-1)[0] + x.max(1).values[0, :3] + x.min(),
        "places": lambda x, m, i, t: m.argmax(1) + i.argmax(1) + m.argmin(1) + m.max(1).indices + t.int().argmax(1),
        "any": lambda x, m, i, t: torch.stack([t.any(1), t.all(1), (i > 90).any(1)]),
        "orders": lambda x, m, i, t: torch.cat(
            [m.sort(0).values, m.topk(3, 1).values.sum(1, True).expand(4, 6), m.argsort(1)]
        ),
        "norms": lambda x, m, i, t: (
            m.norm(dim=1) + m.logsumexp(1) + torch.linalg.vector_norm(m, 1, 1) + m.cumsum(1)[:, -1]
        ),
        "shapes": lambda x, m, i, t: x.transpose(1, 3).reshape(2, 4, -1)[:, 1:, ::5].flip(2).roll((1, -1), (1, 2)),
        "views": lambda x, m, i, t: x.view(2, 3, 2, 4, 2, 4).permute(0, 2, 4, 3, 5, 1).reshape(8, 16, 3),
        "wide": lambda x, m, i, t: (x.view(2, 3, 2, 4, 2, 4) * 2 + x.view(2, 3, 2, 4, 2, 4)[:, :1]).sum((2, 4)),
        "joined": lambda x, m, i, t: torch.stack(torch.cat([m, i], 1).chunk(4, 1)[1:3]).repeat(1, 2, 1).tile(2),
        "split": lambda x, m, i, t: (
            sum(p.sum(1) for p in m.split([1, 3, 2], 1)) + m.unbind(1)[2] + m.unfold(1, 2, 2).sum((1, 2))
        ),
        "triangles": lambda x, m, i, t: (
            m.tril(1) + m.triu(-1) + m[:4, :4].diagonal().sum() + m.flatten().unflatten(0, (4, -1))
        ),
        "padded": lambda x, m, i, t: F.pad(x, (1, 2, -1, 0), value=3) + F.pad(x, (1, 2, -1, 0), mode="reflect"),
        "edges": lambda x, m, i, t: F.pad(x, (2, 0, 1, 1), mode="replicate") + F.pad(x, (1, 1, 2, 0), mode="circular"),
        "products": lambda x, m, i, t: (
            m @ m.T + torch.einsum("ij,kj->ik", m, m + 1) + torch.addmm(m[:, 0], m, m.T, beta=2)
        ),
        "batches": lambda x, m, i, t: x @ x.transpose(2, 3) + x[0] @ x[:, :1] + torch.bmm(x[0], x[1])[0],
        "vectors": lambda x, m, i, t: m @ m[0] + m[0] @ m.T + torch.dot(m[0], m[1]),
        "softmax": lambda x, m, i, t: (
            x.softmax(1) + x.log_softmax(-1) + torch.full_like(x, -3.4028234663852886e38).softmax(2)
        ),
        "layer norm": lambda x, m, i, t: F.layer_norm(x, (8, 8), x[0, 0], x[1, 1]) + F.rms_norm(x, (8,), x[0, 0, 0]),
        "group norm": lambda x, m, i, t: F.group_norm(x.transpose(1, 3), 2, x[0, 0, 0], x[0, 0, 1]),
        "batch norm": lambda x, m, i, t: F.batch_norm(x, m[:3, 0], m[:3, 1].abs(), m[:3, 2], m[:3, 3]),
        "attention": lambda x, m, i, t: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        "masked attention": lambda x, m, i, t: F.scaled_dot_product_attention(x, x, x, x[:, :1, :, :]),
        "shared heads": lambda x, m, i, t: F.scaled_dot_product_attention(
            x, x[:, :1], x[:, :1], x[0, 0] > 0, enable_gqa=True
        ),
        "repeated heads": lambda x, m, i, t: F.scaled_dot_product_attention(
            torch.cat([x, -x], 1), *(y[:, :, None].expand(2, 3, 2, 8, 8).reshape(2, 6, 8, 8) for y in (x, 0.5 * x))
        ),
        "one query head for repeated heads": lambda x, m, i, t: F.scaled_dot_product_attention(
            x[:, :1], *(y[:, :1, None].expand(2, 1, 3, 8, 8).reshape(2, 3, 8, 8) for y in (x, 0.5 * x))
        ),
        "embedding": lambda x, m, i, t: F.embedding(i % 8, table) + F.one_hot(i % 5, 5),
        "gathered": lambda x, m, i, t: (
            m.gather(1, i % 6) + m.gather(0, i % 4) + m.take_along_dim(i[:1, :2] % 6, 1).sum()
        ),
        "indexed": lambda x, m, i, t: (
            x[:, ids % 3, :, -1].sum()
            + x[0, :, ids % 2, ids].sum(0)[0, 0]
            + m[i[:, 0] % 4][:, -1]
            + m[:, [0, -1]].sum()
        ),
        "numbers by number": lambda x, m, i, t: i[ids[0], ids[1]] + i.index_select(1, i[0, :3] % 6)[0],
        "scattered": lambda x, m, i, t: (
            m.scatter(1, i[:, :1] % 6, 9.0) + m.scatter_add(1, i % 6, m) + m.scatter(0, ids % 4, m[:2, :3])
        ),
        "reduced": lambda x, m, i, t: (
            m.scatter_reduce(1, i % 6, m, "amax") + m.index_add(0, ids[0], m[:3]) + m.index_copy(1, ids[0], m[:, :3])
        ),
        "put": lambda x, m, i, t: (
            m.index_put((ids[0], ids[1]), m[0, :3]) + m.index_put((ids[0],), m[:3], accumulate=True)
        ),
        "written": lambda x, m, i, t: (
            torch.slice_scatter(m, m[:, :2], 1, 1, 6, 3) + torch.select_scatter(m, m[0], 0, 2)
        ),
        "convolution": lambda x, m, i, t: F.conv2d(x, w, m[0], 2, 1) + F.conv2d(x, w, None, 2, (2, 2), 2),
        "grouped convolution": lambda x, m, i, t: F.conv2d(x.repeat(1, 2, 1, 1), grouped, None, 1, 1, 1, 6),
        "split convolution": lambda x, m, i, t: F.conv2d(x.repeat(1, 2, 1, 1), w[:4], None, 2, 1, 1, 2),
        "one axis": lambda x, m, i, t: (
            F.conv1d(m, narrow[:, :4], None, padding=1) + F.conv1d(m[None], narrow[:, :4], padding="same")[0]
        ),
        "three axes": lambda x, m, i, t: F.conv3d(
            x.view(2, 3, 4, 2, 8), w.view(6, 3, 3, 1, 3), m[1], padding=(1, 0, 1)
        ),
        "transposed": lambda x, m, i, t: (
            F.conv_transpose2d(x, transposed, m[0, :2], 2, 1, 1)
            + F.conv_transpose2d(x, transposed, None, 2, 0, 0, 1, 1)[:, :, :16, :16]
        ),
        "pools": lambda x, m, i, t: (
            F.max_pool2d(x, 3, 2, 1) + F.avg_pool2d(x, 3, 2, 1) + F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)
        ),
        "long pools": lambda x, m, i, t: (
            F.max_pool2d(x, 3, 2, 0, 1, True) + F.avg_pool2d(x, 3, 2, 0, True) + F.max_pool1d(x[0], 2)[0, :, :1].sum()
        ),
        "adaptive pools": lambda x, m, i, t: (
            F.adaptive_avg_pool2d(x, 1) + F.adaptive_avg_pool2d(x, (3, 5)) + F.adaptive_avg_pool1d(x[0], 3)[0, 0, 0]
        ),
        "resized": lambda x, m, i, t: (
            F.interpolate(x, scale_factor=2.0) + F.interpolate(x, size=(16, 16), mode="bilinear")
        ),
        "resized smoothly": lambda x, m, i, t: (
            F.interpolate(x, (5, 11), mode="bicubic") + F.interpolate(x, (5, 11), mode="bilinear", align_corners=True)
        ),
        "resized axis": lambda x, m, i, t: (
            F.interpolate(x[0], 13, mode="linear") + F.interpolate(x[0], 13, mode="nearest-exact")
        ),
        "halves": lambda x, m, i, t: (m.half() * 2 + m.bfloat16().float()).float() + m.bfloat16().mean(),
        "types": lambda x, m, i, t: m.int() + i.to(torch.int32) + t.long() + m.bool().float() + (t * m),
        "generated": lambda x, m, i, t: (
            torch.arange(6) * m + torch.ones(6) + torch.zeros_like(m) + torch.full((6,), 2.5) + m.new_ones(6)
        ),
    }


def module_of_cases(cases):
    """A module that gives all of `cases`."""
    import torch

    class Rows(torch.nn.Module):
        def forward(self, *args):
            return {name: case(*args) for name, case in cases.items()}

    return Rows()


def arguments():
    import torch

    torch.manual_seed(1)
    return torch.randn(2, 3, 8, 8), torch.randn(4, 6), torch.randint(0, 20, (4, 6)), torch.randn(4, 6) > 0


@pytest.fixture(scope="module")
def rows():
    """Return all cases as one program, the arguments and the results of PyTorch."""
    import torch

    args, model = arguments(), module_of_cases(rows_cases())
    return hocket.from_torch(torch.export.export(model, args, strict=False)), args, model(*args)


@pytest.mark.long
@pytest.mark.parametrize("devices", ["numpy:0", "cpu:0", "cpu:0,cpu:1,cpu:2"])
def test_every_row_gives_what_pytorch_gives(rows, devices):
    program, args, expected = rows
    results = program.on(devices, split_mode="tensor" if "," in devices else "auto")(*args)
    wrong = {
        name: nmse(results[name], theirs)
        for name, theirs in expected.items()
        if results[name].dtype != theirs.dtype or nmse(results[name], theirs) > (1e-5 if name == "halves" else 1e-10)
    }
    assert list(results) == list(expected)
    assert wrong == {}


@pytest.mark.long
def test_a_model_is_sharded_over_devices_and_shares_the_memory_of_its_weights():
    import torch

    model, x = encoder_layer(), torch.randn(2, 5, 32)
    program = hocket.from_torch(torch.export.export(model, (x,)))
    name = "linear1.weight"
    assert program.weights[name].ctypes.data == model.linear1.weight.data_ptr()
    one, two = program.on("cpu:0"), program.on("cpu:0,cpu:1", split_mode="tensor")
    assert str(two.plan.leaves[name]).startswith("S0")
    assert nmse(one(x), model(x)) < 1e-10
    assert nmse(two(x), one(x)) < 1e-10
    again = hocket.plan(hocket.parse(str(program.graph)), "cpu:0")
    (output,) = hocket.load(again, program.weights).run(program.inputs(x)).values()
    assert np.array_equal(output, one(x).numpy())


@pytest.mark.long
def test_assignments_and_indices_of_the_largest_entries_take_few_ops():
    """A region of a slice of a slice is set by one op; indices from `topk` are compared with no zero."""
    import torch

    class Changing(torch.nn.Module):
        def forward(self, x, table):
            y = x.clone()
            y[:, 2, 1, 3:5] = x[:, 0, 0, :2]
            y[1, :, 2] = 7.0
            return y, table[x[:, 0, 0].topk(3).indices.reshape(-1)]

    x, table = torch.randn(2, 3, 4, 6), torch.randn(6, 5)
    x[0, 0, 0, 2], x[0, 0, 0, 4] = float("nan"), float("inf")
    program = hocket.from_torch(torch.export.export(Changing(), (x, table)))
    found = [node.op for node in program.graph.nodes]
    assert (found.count("set"), found.count("argsort"), found.count("compare")) == (2, 1, 0)
    assert [node.attrs["offsets"] for node in program.graph.nodes if node.op == "set"] == [(0, 2, 1, 3), (1, 0, 2, 0)]
    for own, theirs in zip(program.on("cpu:0")(x, table), Changing()(x, table), strict=True):
        assert torch.equal(own.nan_to_num(99.0), theirs.nan_to_num(99.0))


@pytest.mark.long
def test_all_of_an_encoder_is_compiled():
    import torch

    program = hocket.from_torch(torch.export.export(encoder_layer(), (torch.randn(2, 5, 32),)))
    assert "NumPy" not in program.on("cpu:0").executor.list_kernel_names()


@pytest.mark.long
def test_a_buffer_that_changes_is_a_state():
    import torch

    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.tensor([1.0, 2.0]))

        def forward(self, x):
            self.seen.add_(x)
            return self.seen * 2

    runner = hocket.from_torch(torch.export.export(Counting(), (torch.ones(2),))).on("cpu:0")
    assert [runner(torch.ones(2)).tolist() for _ in range(2)] == [[4.0, 6.0], [6.0, 8.0]]


class TestFiles:
    """Programs in files of `torch.export.save`; some files were tampered with."""

    @pytest.fixture(scope="class")
    def saved_program(self, tmp_path_factory):
        import torch

        model, x = encoder_layer(), torch.randn(1, 3, 32)
        path = tmp_path_factory.mktemp("programs") / "model.pt2"
        torch.export.save(torch.export.export(model, (x,)), path)
        return path, model, x

    def change_member(self, path, member, edit):
        """A copy in which `edit` made something else of the bytes of a member."""
        copy = path.with_name(f"changed-{len(list(path.parent.iterdir()))}.pt2")
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(copy, "w") as new:
            for info in old.infolist():
                data = old.read(info)
                new.writestr(info.filename, edit(data) if info.filename.endswith(member) else data)
        return copy

    @pytest.mark.long
    def test_a_program_is_read_and_planned_by_the_commands(self, saved_program, capsys):
        from hocket.cli import main
        from hocket.frontends.torch.pt2_archive import read_program

        path, model, x = saved_program
        assert nmse(hocket.from_torch(read_program(str(path))).on("cpu:0")(x), model(x)) < 1e-10
        assert main(["plan", str(path), "--devices", "cpu:0,cpu:1"]) == 0
        assert "nodes" in capsys.readouterr().out
        assert main(["dump", str(path)]) == 0
        assert "%linear1.weight = weight() : f32[64,32]" in capsys.readouterr().out
        assert main(["check", "--backend", "numpy", "--from-graph", str(path)]) == 0

    @pytest.mark.long
    def test_what_would_run_code_is_refused_or_not_read(self, saved_program, tmp_path):
        from hocket.frontends.torch.pt2_archive import read_program

        path, *_ = saved_program
        marker = tmp_path / "told"
        harm = b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
        read_program(str(self.change_member(path, "sample_inputs/model.pt", lambda data: harm)))
        assert not marker.exists()
        for target in ("torch.os.system", "torch.load", "_operator.call", "torch.ops.higher_order.cond"):
            with pytest.raises(ModelError, match="ATen ops alone"):
                read_program(
                    str(self.change_member(path, "models/model.json", lambda d, t=target: replace_call_target(d, t)))
                )
        pickled = self.change_member(
            path, "model_weights_config.json", lambda d: d.replace(b'"use_pickle": false', b'"use_pickle": true')
        )
        with pytest.raises(ModelError, match="pickled"):
            read_program(str(pickled))

    @pytest.mark.long
    @pytest.mark.parametrize("member", ["models/model.json", "model_weights_config.json", "weights/weight_0"])
    def test_a_damaged_file_is_one_line(self, saved_program, member):
        from hocket.frontends.torch.pt2_archive import read_program

        path, *_ = saved_program
        for edit in (lambda d: d[: len(d) // 2], lambda d: b"", lambda d: b"[1]"):
            with pytest.raises(ModelError, match=r"^[^\n]+$"):
                read_program(str(self.change_member(path, member, edit)))


def replace_call_target(program, target):
    """Return the JSON of a program with another function in its first node."""
    document = json.loads(program)
    document["graph_module"]["graph"]["nodes"][0]["target"] = target
    return json.dumps(document).encode()


class TestRefused:
    """Programs that are refused with one line, which names the problem and the remedy."""

    def program(self, function, *args, **more):
        import torch

        class Model(torch.nn.Module):
            def forward(self, *args):
                return function(*args)

        return hocket.from_torch(torch.export.export(Model(), args, strict=False, **more))

    @pytest.mark.long
    def test_missing_ops_are_listed_with_their_numbers(self):
        import torch

        with pytest.raises(ModelError, match=r"aten\.special_i1\.default \(2\), aten\.erfinv\.default \(1\)"):
            self.program(lambda x: torch.special.i1(x) * torch.special.i1(x + 1) + x.erfinv(), torch.eye(3))

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("function", "shape", "dtype", "message"),
        [
            (lambda x: x * 2, (3,), "complex64", "complex64"),
            (lambda x: x * 2, (3,), "float64", "float64"),
            (lambda x: x[x > 0], (3,), "float32", "depends on numbers"),
        ],
    )
    def test_what_hocket_has_not(self, function, shape, dtype, message):
        import torch

        with pytest.raises(ModelError, match=message) as error:
            self.program(function, torch.zeros(shape, dtype=getattr(torch, dtype)))
        assert "\n" not in str(error.value)

    @pytest.mark.long
    def test_control_flow_by_data(self):
        import torch

        with pytest.raises(ModelError, match="cond"):
            self.program(lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)), torch.zeros(3))

    @pytest.mark.long
    def test_shapes_that_vary(self):
        import torch

        with pytest.raises(ModelError, match="without dynamic_shapes"):
            self.program(lambda x: x * 2, torch.zeros(3, 4), dynamic_shapes=(({0: torch.export.Dim("n")},),))

    @pytest.mark.long
    def test_a_training_graph(self):
        import torch

        exported = torch.export.export(torch.nn.Dropout(0.5).train(), (torch.ones(3),))
        with pytest.raises(ModelError, match=r"model\.eval\(\)"):
            hocket.from_torch(exported)

    @pytest.mark.long
    def test_weights_without_numbers(self):
        import torch

        with torch.device("meta"):
            model, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
        with pytest.raises(ModelError, match="meta device"):
            hocket.from_torch(torch.export.export(model, (x,)))

    def test_what_is_no_program(self):
        with pytest.raises(ModelError, match=r"torch\.export\.export"):
            hocket.from_torch("model.pt2")

    @pytest.mark.long
    def test_arguments_that_do_not_fit(self):
        import torch

        runner = self.program(lambda x, n: x * n, torch.ones(3), 2).on("cpu:0")
        with pytest.raises(ModelError, match=r"float32\[4\].*float32\[3\]"):
            runner(torch.ones(4), 2)
        with pytest.raises(ModelError, match="int64"):
            runner(torch.ones(3, dtype=torch.int64), 2)
        with pytest.raises(ModelError, match=r"args\[1\] is 3; the program was exported for 2"):
            runner(torch.ones(3), 3)
