"""`torch.compile` with hocket's backend, given as a function: an entry point is seen once hocket is installed."""

from __future__ import annotations

import copy
import gc
import importlib.util
import threading
import weakref

import numpy as np
import pytest

from hocket.frontends.errors import ModelError

from ...given.tensors import encoder_layer, nmse

DEVICES = [
    {"devices": "cpu:0"},
    {"devices": "cpu:0,cpu:1", "split_mode": "tensor"},
    {"devices": "numpy:0"},
]

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's own, of its own deprecations
]


def through_hocket(model, **options):
    import torch

    from hocket.frontends.torch.dynamo import compile_graph

    return torch.compile(model, backend=compile_graph, options=options)


@pytest.mark.long
def test_a_model_runs_on_devices_for_each_shape_and_sees_its_weights_change():
    import torch

    model = encoder_layer()
    ours = through_hocket(model, devices="cpu:0,cpu:1", split_mode="tensor")
    with torch.no_grad():
        for length in (5, 5, 3):
            x = torch.randn(2, length, 32)
            assert nmse(ours(x), model(x)) < 1e-10
        model.linear1.weight.mul_(2)
        assert nmse(ours(x), model(x)) < 1e-10
    with pytest.raises(ModelError, match="no gradients"):
        ours(x)


@pytest.mark.long
def test_pytorch_runs_what_has_no_row_and_a_warning_says_so():
    import torch

    ours = through_hocket(lambda x: torch.special.i1(x) + 1)
    with pytest.warns(UserWarning, match="special_i1"):
        assert torch.equal(ours(torch.ones(3)), torch.special.i1(torch.ones(3)) + 1)


@pytest.mark.long
def test_a_graph_breaks_only_at_an_op_without_a_row(monkeypatch):
    """PyTorch runs that op; before and behind it are one program of hocket each, which see their weights change."""
    import torch

    from hocket.frontends.torch import dynamo

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

        def forward(self, x):
            hidden = torch.special.i1(self.first(x).tanh())
            return self.second(hidden) + hidden.sum(), hidden

    programs = []
    taken = dynamo.import_program
    monkeypatch.setattr(dynamo, "import_program", lambda *args: programs.append(taken(*args)) or programs[-1])
    model, x = Model().eval(), torch.randn(3, 8)
    ours = through_hocket(model, devices="cpu:0,cpu:1", split_mode="tensor")
    with torch.no_grad():
        with pytest.warns(UserWarning, match=r"has no row for: .*special_i1.* \(1\)"):
            ours(x)
        model.second.weight.mul_(2)
        for mine, theirs in zip(ours(x), model(x), strict=True):
            assert nmse(mine, theirs) < 1e-10
    ops_of = [{node.op for node in program.graph.nodes} for program in programs]
    assert [("mul_mat" in ops, "tanh" in ops) for ops in ops_of] == [(True, True), (True, False)]


@pytest.mark.long
def test_an_option_that_is_none():
    import torch

    from hocket.frontends.torch.dynamo import compile_graph

    with pytest.raises(ModelError, match="'device'"):
        compile_graph(torch.fx.symbolic_trace(torch.nn.ReLU()), [], options={"device": "cpu:0"})


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [None, True])
def test_numbers_that_change_from_call_to_call_are_those_of_a_program_each(dynamic, monkeypatch, recwarn):
    """Dynamo hands over a float that has changed, and all floats of a dynamic model, as a tensor that it reads."""
    import torch

    from hocket.frontends.torch import dynamo

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)

        def forward(self, x, *, scale=1.0):
            return {"y": self.norm(self.linear(x) * scale)}

    monkeypatch.setattr(dynamo, "MAX_SCALAR_PROGRAMS", 3)
    model, x = Model().eval(), torch.randn(3, 8)
    ours = torch.compile(model, backend=dynamo.compile_graph, options={"devices": "cpu:0,cpu:1"}, dynamic=dynamic)
    with torch.no_grad():
        for scale in (1.0, 2.5, 0.25, 2.5):
            assert nmse(ours(x, scale=scale)["y"], model(x, scale=scale)["y"]) < 1e-10
        assert not [w for w in recwarn if "PyTorch runs" in str(w.message)]
        results = {}
        with pytest.warns(UserWarning, match="more than 3 numbers"):
            results.update({scale: ours(x, scale=scale)["y"] for scale in (3.0, 4.0, 5.0)})
        for scale, result in results.items():
            assert nmse(result, model(x, scale=scale)["y"]) < 1e-10


def layers(count):
    """`count` layers of one class with a graph break inside each."""
    import torch

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(48, 32), torch.nn.Linear(32, 48)

        def forward(self, x):
            hidden = torch.relu(self.first(x))
            torch._dynamo.graph_break()
            return self.second(hidden)

    return torch.nn.Sequential(*(Layer() for _ in range(count))).eval()


class TestOneGraphForSeveralModules:
    """Dynamo calls one captured graph for all modules of a class: each is computed with its own parameters."""

    @pytest.fixture(autouse=True)
    def fresh(self):
        import torch

        torch._dynamo.reset()
        torch.manual_seed(0)
        with torch.no_grad():
            yield

    def assert_right(self, call, *modules):
        import torch

        for module in modules:
            x = torch.randn(3, 48, dtype=next(module.parameters()).dtype)
            ours, theirs = call(module, x), module(x)
            assert ours.dtype == theirs.dtype
            assert nmse(ours, theirs) < (1e-10 if ours.dtype == torch.float32 else 1e-4)

    @pytest.mark.long
    @pytest.mark.parametrize("options", DEVICES, ids=str)
    def test_layers_that_break_inside_have_their_own_weights(self, options):
        for model in (layers(1), layers(3)):
            ours = through_hocket(model, **options)
            self.assert_right(lambda _, x, run=ours: run(x), model)

    @pytest.mark.long
    @pytest.mark.parametrize("options", DEVICES, ids=str)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_parameters_that_are_swapped_replaced_tied_moved_and_changed_between_calls(self, options, dtype):
        import torch

        a, b = (torch.nn.Linear(48, 24).to(getattr(torch, dtype)) for _ in range(2))
        call = through_hocket(lambda module, x: module(x), **options)
        self.assert_right(call, a, b, a)
        a.weight.add_(1)
        b.bias.mul_(3)
        self.assert_right(call, a, b)
        b.weight = torch.nn.Parameter(torch.randn_like(b.weight))
        self.assert_right(call, b, a)
        a.load_state_dict(b.state_dict())
        self.assert_right(call, a, b)
        for _ in range(4):  # the memory of one before the last may come again
            a.weight.data = torch.randn_like(a.weight)
            a.weight.data = torch.randn_like(a.weight)
            self.assert_right(call, a, b)
        a.weight, b.weight = b.weight, a.weight
        self.assert_right(call, a, b)
        a.weight = b.weight
        self.assert_right(call, a, b)
        b.weight = torch.nn.Parameter(b.weight + 1)
        self.assert_right(call, a, b)
        a.requires_grad_(False)
        c = copy.deepcopy(a)
        c.bias.add_(1)
        self.assert_right(call, c, a)

    @pytest.mark.long
    @pytest.mark.parametrize("options", DEVICES, ids=str)
    def test_parameters_that_are_transposed_or_share_memory_through_their_data(self, options):
        """The address of a transposed matrix stays; PyTorch counts changes of parameters with the same memory apart."""
        import torch

        a, b = torch.nn.Linear(48, 48), torch.nn.Linear(48, 48)
        call = through_hocket(lambda module, x: module(x), **options)
        self.assert_right(call, a, b)
        a.weight.data = a.weight.data.t()
        self.assert_right(call, a, b)
        a.weight.mul_(2)
        self.assert_right(call, a, b)
        b.weight.data, b.bias.data = a.weight.data, a.bias.data
        self.assert_right(call, b, a)
        a.weight.add_(1)
        self.assert_right(call, b, a)
        b.bias.sub_(1)
        self.assert_right(call, a, b)
        b.weight.data = b.weight.data.clone()
        a.weight.mul_(0.5)
        self.assert_right(call, a, b)

    @pytest.mark.long
    def test_shards_of_several_ranges_see_changes_in_place(self, monkeypatch):
        """Each device has a part of the values and of the gates, so its shard is no view of the parameter."""
        import torch

        from hocket.backends.host.host_backend import HostBackend

        class Gated(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down = torch.nn.Linear(48, 2 * 64), torch.nn.Linear(64, 48)

            def forward(self, x):
                value, gate = self.up(x).chunk(2, -1)
                return self.down(value * gate.sigmoid())

        source_arrays = []
        as_buffer = HostBackend.as_buffer
        monkeypatch.setattr(HostBackend, "as_buffer", lambda *args: source_arrays.append(args[1]) or as_buffer(*args))
        a, b = Gated(), Gated()
        call = through_hocket(lambda module, x: module(x), **DEVICES[1])
        self.assert_right(call, a, b)
        for parameter in a.parameters():
            parameter.mul_(1.5)
        self.assert_right(call, a, b)
        memories = [parameter.detach().numpy() for module in (a, b) for parameter in module.parameters()]
        assert source_arrays
        assert all(any(np.may_share_memory(array, memory) for memory in memories) for array in source_arrays)

    @pytest.mark.long
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "bool"])
    def test_buffers_of_each_type_that_the_graph_changes(self, dtype):
        import torch

        def write(module, x):
            module.cache[1:2] = x
            return module.cache.sum()

        call = through_hocket(write)
        for _ in range(2):
            mine, other = torch.nn.Module(), torch.nn.Module()
            mine.cache, other.cache = (torch.zeros(3, 16, dtype=getattr(torch, dtype)) for _ in range(2))
            x = (torch.randn(1, 16) * 3).to(getattr(torch, dtype))
            assert nmse(call(mine, x), write(other, x)) < 1e-4
            assert torch.equal(mine.cache, other.cache)

    @pytest.mark.long
    def test_the_memory_of_a_parameter_is_read_where_it_is(self):
        """A change that PyTorch misses is seen, too, and devices have no copy."""
        import torch

        from hocket.frontends.torch.parameter_binding import _copies_by_parameter

        module = torch.nn.Linear(48, 48)
        call = through_hocket(lambda module, x: module(x))
        self.assert_right(call, module)
        module.weight.data.mul_(2)
        self.assert_right(call, module)
        assert not _copies_by_parameter[module.weight].copies_by_key

    @pytest.mark.long
    def test_graphs_share_the_copies_of_a_parameter(self, monkeypatch):
        """Half of a weight in rows goes without a copy; by columns each device has one, for all shapes."""
        import torch

        from hocket.backends.host.host_backend import HostBackend
        from hocket.frontends.torch.parameter_binding import _copies_by_parameter

        monkeypatch.setattr(HostBackend, "as_buffer", lambda *_: None)
        module = torch.nn.Linear(48, 48)
        call = through_hocket(lambda module, x: module(x), devices="cpu:0,cpu:1", split_mode="tensor")
        for count in (1, 2, 3):
            x = torch.randn(count, 48)
            assert nmse(call(module, x), module(x)) < 1e-10
            assert (
                sum(buffer.nbytes for _, buffer in _copies_by_parameter[module.weight].copies_by_key.values())
                == module.weight.nbytes
            )
        module.weight.add_(1)
        for count in (3, 2, 1):
            x = torch.randn(count, 48)
            assert nmse(call(module, x), module(x)) < 1e-10

    @pytest.mark.long
    @pytest.mark.parametrize("options", DEVICES, ids=str)
    def test_a_module_that_is_dropped_frees_its_memory(self, options):
        import torch

        from hocket.frontends.torch.parameter_binding import _copies_by_parameter

        call = through_hocket(lambda module, x: module(x), **options)
        module = torch.nn.Linear(48, 48)
        self.assert_right(call, module)
        before, gone = len(_copies_by_parameter), []
        for _ in range(3):
            module = torch.nn.Linear(48, 48)
            self.assert_right(call, module)
            gone.append(weakref.ref(module.weight))
        del module
        gc.collect()
        assert not any(ref() is not None for ref in gone)
        assert len(_copies_by_parameter) <= before

    @pytest.mark.long
    def test_parameters_of_a_functional_call(self):
        import torch

        module = torch.nn.Linear(48, 24)
        call = through_hocket(lambda parameters, x: torch.func.functional_call(module, parameters, (x,)))
        for factor in (1, 2, 3):
            parameters = {name: torch.nn.Parameter(p * factor) for name, p in module.named_parameters()}
            x = torch.randn(3, 48)
            assert nmse(call(parameters, x), torch.func.functional_call(module, parameters, (x,))) < 1e-10
            plain = {name: p.detach() for name, p in parameters.items()}
            assert nmse(call(plain, x), torch.func.functional_call(module, plain, (x,))) < 1e-10

    @pytest.mark.long
    @pytest.mark.parametrize("options", DEVICES, ids=str)
    def test_buffers_and_parameters_that_the_graph_changes(self, options):
        import torch

        class Counting(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = torch.nn.BatchNorm1d(48).eval()
                self.register_buffer("table", torch.randn(64, 48))
                self.register_buffer("cache", torch.zeros(8, 48))
                self.scale = torch.nn.Parameter(torch.ones(48))

            def forward(self, x, at):
                self.cache.index_copy_(0, at, x)
                self.norm.running_mean.mul_(0.5).add_(x.mean(0))
                self.scale.add_(1)
                return self.norm(self.cache) * self.scale + self.table[:8]

        ours, theirs = (Counting().eval() for _ in range(2)), []
        ours = list(ours)
        theirs = [copy.deepcopy(module) for module in ours]
        call = through_hocket(lambda module, x, at: module(x, at), **options)
        for step in (0, 1, 2):
            for mine, other in zip(ours, theirs, strict=True):
                x, at = torch.randn(3, 48), torch.tensor([step, step + 1, 7])
                assert nmse(call(mine, x, at), other(x, at)) < 1e-10
                for name, tensor in other.state_dict().items():
                    assert nmse(mine.state_dict()[name], tensor) < 1e-10
                mine.table.add_(1)
                other.table.add_(1)

    @pytest.mark.long
    def test_a_graph_that_breaks_at_an_op_without_a_row(self):
        import torch

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = torch.nn.Linear(48, 16), torch.nn.Linear(16, 4)

            def forward(self, x):
                return self.second(torch.special.i1(self.first(x).tanh()))

        call = through_hocket(lambda module, x: module(x))
        a, b = Model().eval(), Model().eval()
        self.assert_right(call, a, b, a)
        b.second.weight.mul_(2)
        self.assert_right(call, b, a)

    @pytest.mark.long
    def test_threads_that_alternate_two_modules(self):
        import torch

        modules = [torch.nn.Linear(48, 48) for _ in range(2)]
        call = through_hocket(lambda module, x: module(x))
        self.assert_right(call, modules[0])  # PyTorch itself exports on one thread alone
        failures, finished = [], []

        def alternate(first):
            try:
                with torch.no_grad():
                    for turn in range(40):
                        module, x = modules[(first + turn) % 2], torch.randn(3, 48)
                        assert nmse(call(module, x), module(x)) < 1e-10
                finished.append(first)
            except Exception as why:
                failures.append(why)

        threads = [threading.Thread(target=alternate, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert sorted(finished) == [0, 1, 2, 3]

    @pytest.mark.long
    def test_parameters_that_pytorch_counts_no_changes_of(self):
        import torch

        with torch.inference_mode():
            module = torch.nn.Linear(48, 48)
            call = through_hocket(lambda module, x: module(x))
            self.assert_right(call, module)
            module.weight.mul_(2)
            self.assert_right(call, module)

    @pytest.mark.long
    def test_an_argument_that_is_changed_and_shares_memory_is_left_to_pytorch(self):
        import torch

        def change(whole, part):
            part.mul_(2)
            return whole + 1

        call = through_hocket(change)
        mine, other = torch.ones(4, 4), torch.ones(4, 4)
        with pytest.warns(UserWarning, match="shares memory"):
            ours = call(mine, mine[0])
        assert torch.equal(ours, change(other, other[0]))
        assert torch.equal(mine, other)
