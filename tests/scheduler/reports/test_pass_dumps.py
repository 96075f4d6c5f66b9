"""The result of each pass on each small model, as text that was read by eye.

`pytest --update-golden` writes it anew.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hocket.cli import main
from hocket.frontends.gguf import Gguf, open_gguf
from hocket.frontends.models import Step, load_model
from hocket.graph import Graph, format_graph
from hocket.scheduler import plan_for_group
from hocket.scheduler.costs.simulated_devices import parse_simulated_group
from hocket.scheduler.lowering.lower import lower_graph
from hocket.scheduler.reports.pass_dumps import (
    format_device_graphs,
    format_factor_tables,
    format_layouts,
    format_memory_map,
    format_program,
)
from hocket.scheduler.sharding.factors import Factors
from hocket.scheduler.sharding.layer_split import emit_placed_graphs, split_layers
from hocket.scheduler.sharding.partitioner import partition_graph
from hocket.scheduler.sharding.propagation import propagate_layouts
from hocket.scheduler.sharding.search.greedy_search import FactorSearch
from hocket.scheduler.sharding.shard_ranges import ShardRanges

from ...given.models.goldens import GOLDENS, path_of

PASSED = GOLDENS / "passes"
DECODE, PREFILL = Step(1, 1, 16, 16, 1), Step(2, 4, 16, 16, 2)


def layers(name: str, *indices: int, **keys: int) -> Gguf:
    """The fixture with these layers alone, and such metadata."""
    model = open_gguf(path_of(name), header_only=True)
    arch = model.metadata["general.architecture"]
    tensors = {n: t for n, t in model.tensors.items() if not n.startswith("blk.")}
    for new, old in enumerate(indices):
        own = {n.removeprefix(f"blk.{old}."): t for n, t in model.tensors.items() if n.startswith(f"blk.{old}.")}
        tensors |= {f"blk.{new}.{n}": t for n, t in own.items()}
    changed = {f"{arch}.{key}": value for key, value in {"block_count": len(indices), **keys}.items()}
    return replace(model, tensors=tensors, metadata={**model.metadata, **changed})


MODELS = {
    "dense": lambda: load_model(layers("llama", 0)).graph(DECODE),
    "hybrid": lambda: load_model(layers("qwen35", 0, 2, full_attention_interval=2)).graph(DECODE),
    "experts": lambda: load_model(layers("qwen3moe", 0)).graph(DECODE),
    "experts-prefill": lambda: load_model(layers("qwen3moe", 0)).graph(PREFILL),
}


def passes(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield the name of each pass and its result for `graph` on two devices."""
    simulation = parse_simulated_group("cpu:2")
    backend, device = simulation.group[0]
    yield "1-built", format_graph(graph)
    factors = Factors(graph)
    yield "2-factors", format_factor_tables(factors)
    chosen = FactorSearch(graph, factors).choose_fastest_factors(2, simulation.hardware, eager=True).factors
    sharded = partition_graph(graph, factors, propagate_layouts(graph, factors, chosen), ShardRanges([1, 1]))
    yield "3-sharded", format_layouts(sharded.leaves, sharded.outputs) + "\n\n" + format_device_graphs(sharded.graphs)
    placed = emit_placed_graphs(graph, split_layers(graph, [1, 1]), 2)
    yield "4-placed", format_layouts(placed.leaves, placed.outputs) + "\n\n" + format_device_graphs(placed.graphs)
    lowered, program = lower_graph(sharded.graphs[0], backend, device)
    yield "5-lowered", changes(sharded.graphs[0], lowered)
    yield "6-memory", format_memory_map(program)
    yield "7-program", format_program(program)


def changes(before: Graph, after: Graph) -> str:
    """Lines that went and that came, and those around them."""
    difference = difflib.unified_diff(
        format_graph(before).splitlines(), format_graph(after).splitlines(), n=1, lineterm=""
    )
    return "\n".join(["  ..." if line.startswith("@@") else line for line in list(difference)[2:]]) or "nothing changes"


def round_floats(text: str) -> str:
    """`text` with floats of at most four digits."""
    floats = re.compile(r"(?<![\w.])\d+\.\d{4,}(?:e[+-]?\d+)?")
    return floats.sub(lambda found: f"{float(found[0]):.4g}", text).rstrip("\n") + "\n"


@pytest.mark.parametrize("name", MODELS)
def test_each_pass_makes_of_a_small_model_what_was_read_by_eye(name: str, update_golden: bool) -> None:
    folder = PASSED / name
    dumps = {f"{number}.txt": round_floats(text) for number, text in passes(MODELS[name]())}
    if update_golden:
        folder.mkdir(parents=True, exist_ok=True)
        for file in set(folder.iterdir()) - {folder / n for n in dumps}:
            file.unlink()
        for file_name, text in dumps.items():
            (folder / file_name).write_text(text, encoding="utf-8")
    golden_texts = {file.name: file.read_text(encoding="utf-8") for file in folder.glob("*.txt")}
    assert golden_texts.keys() == dumps.keys(), "run pytest --update-golden and read what it wrote"
    for file_name, text in dumps.items():
        assert text == golden_texts[file_name], f"{name}/{file_name} is not what the pass makes now"


@pytest.mark.parametrize(
    ("pass_name", "words"),
    [
        (
            "graph",
            "%blk.0.attn_q = mul_mat(%blk.0.attn_q.weight, %blk.0.attn_norm, ordered=false, exact=true) : ",
        ),
        ("factors", "%blk.0.attn_q.weight       f16[64,64]      (d e g)  b"),
        ("layouts", "leaf    %blk.0.attn_q.weight       S0 0+32 | 32+32"),
        ("shards", "%wanted.sum = all_reduce(%wanted, sequence=2) : f32[1,64]"),
        ("memory", "cpu:1: arena of "),
        ("steps", " steps\nstep  op "),
    ],
)
def test_the_command_shows_the_result_of_a_pass(pass_name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(path_of("llama"))
    assert main(["plan", path, "-c", "16", "--simulate", "cpu:2", "--split-mode", "tensor", "--show", pass_name]) == 0
    assert words in capsys.readouterr().out


def test_the_map_of_memory_covers_what_instructions_touch_and_shows_long_programs_in_fewer_columns() -> None:
    simulation = parse_simulated_group("cpu:1")
    plan = plan_for_group(load_model(layers("qwen35", 0, 1, 2)).graph(PREFILL), simulation.group)
    program = plan.device_plans[0].program
    map_lines = format_memory_map(program).splitlines()
    steps = len(program.instructions)
    assert map_lines[1].split()[:6] == ["offset", "bytes", "steps", "0", "to", f"{steps - 1},"]
    bars = [line.split()[2] for line in map_lines[2 : map_lines.index("")]]
    assert {len(bar) for bar in bars} == {-(-steps // 2)}
    assert all(any(bar[column] == "#" for bar in bars) for column in range(len(bars[0])))
