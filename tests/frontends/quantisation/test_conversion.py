"""``hocket quantize``: files that other readers read, bounds of memory, and refusals that leave no file."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest

from hocket.cli import main
from hocket.frontends.gguf import open_gguf
from hocket.frontends.gguf.writer import read_encoded_metadata_pairs
from hocket.frontends.quantisation import conversion
from hocket.graph.dtypes import DType
from hocket.graph.storage.resumable_file import resuming

from ...given.commands import Capture
from ...given.models.spelled import write_llama


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model.gguf")


def quantize(*words: object) -> int:
    return main(["quantize", *map(str, words), "-t", "2"])


def refusal(capsys: Capture, *words: object) -> str:
    """The one line that a refused command prints."""
    capsys.readouterr()
    assert quantize(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_the_file_has_the_same_tensors_and_metadata_for_the_reader_of_the_gguf_package(source, tmp_path):
    assert quantize(source, tmp_path / "out.gguf", "q8_0") == 0
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(tmp_path / "out.gguf")
    assert [t.name for t in after.tensors] == [t.name for t in before.tensors]
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert old.shape.tolist() == new.shape.tolist()
        is_matrix = len(old.shape) > 1
        assert new.tensor_type.name == ("Q8_0" if is_matrix else "F32")
        want = gguf.quants.quantize(old.data, gguf.GGMLQuantizationType.Q8_0) if is_matrix else old.data
        assert new.data.tobytes() == want.tobytes()
    before_pairs = {key: field.contents() for key, field in before.fields.items() if not key.startswith("GGUF.")}
    got = {key: field.contents() for key, field in after.fields.items() if not key.startswith("GGUF.")}
    assert got == before_pairs | {"general.file_type": 7, "general.quantization_version": 2}
    assert after.fields["general.file_type"].types == [gguf.GGUFValueType.UINT32]


def test_a_quantised_model_writes_text(source, tmp_path, capsys):
    assert quantize(source, tmp_path / "out.gguf", "q8_0") == 0
    capsys.readouterr()
    for path in (source, tmp_path / "out.gguf"):
        assert main(["run", str(path), "-p", "yes", "--temp", "0", "-n", "4", "-c", "64"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


def test_rows_without_whole_blocks_are_reported_with_their_dtype(source, tmp_path, capsys):
    assert quantize(source, tmp_path / "out.gguf", "q4_k_s", "--dry-run") == 0
    printed = capsys.readouterr()
    assert "q4_K needs rows of a multiple of 256, got 32; stored as q5_0" in printed.err
    assert "blk.0.attn_q.weight  32×32  f32 -> q5_0" in printed.out
    assert "bits per weight" in printed.out
    assert not (tmp_path / "out.gguf").exists()


def test_the_dry_run_announces_the_size_of_the_file(source, tmp_path, capsys):
    assert quantize(source, tmp_path / "out.gguf", "q5_1", "--dry-run") == 0
    announced = capsys.readouterr().out.splitlines()[-3:]
    assert quantize(source, tmp_path / "out.gguf", "q5_1") == 0
    assert capsys.readouterr().out.splitlines()[-3:] == announced
    nbytes = sum(t.nbytes for t in open_gguf(tmp_path / "out.gguf").tensors.values())
    assert announced[-1].startswith(f"after: {nbytes / 2**20:.1f} MiB, ")


def test_a_quantised_file_is_quantised_again_only_on_request(source, tmp_path, capsys):
    assert quantize(source, tmp_path / "q8.gguf", "q8_0") == 0
    line = refusal(capsys, tmp_path / "q8.gguf", tmp_path / "out.gguf", "q4_0")
    assert "tensor blk.0.attn_q.weight is q8_0 already, and a second rounding adds its error" in line
    assert not (tmp_path / "out.gguf").exists()
    assert quantize(tmp_path / "q8.gguf", tmp_path / "out.gguf", "f32", "--allow-requantize") == 0
    stored, back = open_gguf(tmp_path / "q8.gguf"), open_gguf(tmp_path / "out.gguf")
    assert all(np.array_equal(t.dequantise(), back.tensor(n).dequantise()) for n, t in stored.tensors.items())


def test_a_damaged_weight_is_named_and_no_file_is_left(source, tmp_path, capsys):
    damaged = tmp_path / "damaged.gguf"
    data = bytearray(source.read_bytes())
    tensor = open_gguf(source).tensor("blk.0.ffn_up.weight")
    for value, problem in ((np.nan, "NaN"), (1e6, "the magnitude 1e+06"), (np.inf, "the magnitude inf")):
        data[tensor.offset + 400 : tensor.offset + 404] = np.float32(value).tobytes()
        damaged.write_bytes(data)
        line = refusal(capsys, damaged, tmp_path / "out.gguf", "q8_0")
        assert f"tensor blk.0.ffn_up.weight has a value of {problem}; q8_0 needs magnitudes up to 65504" in line
        assert sorted(os.listdir(tmp_path)) == ["damaged.gguf", "model.gguf"]


@pytest.mark.long
def test_numbers_beyond_the_largest_one_of_nvfp4_are_refused(tmp_path, capsys):
    weight, name = np.ones((4, 64), np.float32), "blk.0.ffn_up.weight"
    words = ("q8_0", "--tensor-type", "ffn=nvfp4")
    weight[2, 5] = 2688
    model = write_tensors(tmp_path / "m.gguf", {name: weight})
    assert quantize(model, tmp_path / "out.gguf", *words) == 0
    assert open_gguf(tmp_path / "out.gguf").tensor(name).dequantise().max() == 2688
    weight[2, 5] = 3000
    write_tensors(model, {name: weight})
    line = refusal(capsys, model, tmp_path / "out.gguf", *words)
    assert "has a value of the magnitude 3000; nvfp4 needs magnitudes up to 2688" in line


def fail_at_part(number: int, error: BaseException | type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the quantiser raise an error at its part `number`, from 1, and at each later one."""
    quantise, calls = conversion.quantise_rows, iter(range(1, 1000))

    def fail_or_quantise(*arguments):
        if next(calls) >= number:
            raise error
        return quantise(*arguments)

    monkeypatch.setattr(conversion, "quantise_rows", fail_or_quantise)


def count_quantised_parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each later call of the quantiser adds its number of elements."""
    quantise, sizes = conversion.quantise_rows, []

    def count_and_quantise(x, *others):
        sizes.append(x.size)
        return quantise(x, *others)

    monkeypatch.setattr(conversion, "quantise_rows", count_and_quantise)
    return sizes


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError(28, "No space left on device")], ids=str)
def test_an_interrupted_conversion_leaves_the_old_file_and_continues(error, source, tmp_path, monkeypatch, capsys):
    out, whole = tmp_path / "out.gguf", tmp_path / "whole.gguf"
    assert quantize(source, whole, "q8_0") == 0
    out.write_bytes(b"old")
    with monkeypatch.context() as patch:
        fail_at_part(4, error, patch)
        assert quantize(source, out, "q8_0") == (130 if error is KeyboardInterrupt else 2)
    assert out.read_bytes() == b"old"
    partial = tmp_path / "out.gguf.partial"
    assert sorted(os.listdir(tmp_path)) == [
        "model.gguf",
        "out.gguf",
        partial.name,
        f"{partial.name}.record",
        whole.name,
    ]
    lines = capsys.readouterr().err.splitlines()
    (complete,) = (int(line.split()[1]) for line in lines if line.startswith(str(partial)))
    assert complete >= 3
    assert any("out.gguf" in line and "No space left" in line for line in lines) == isinstance(error, OSError)
    sizes = count_quantised_parts(monkeypatch)
    assert quantize(source, out, "q8_0") == 0
    assert f"{partial}: continue after {complete} of 11 tensors" in capsys.readouterr().err
    assert 0 < len(sizes) < 8
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["model.gguf", "out.gguf", "whole.gguf"]


def interrupt(source: Path, out: Path, *words: str) -> None:
    """Leave partial files of a conversion that stops at its last matrices."""
    with pytest.MonkeyPatch.context() as patch:
        fail_at_part(5, KeyboardInterrupt, patch)
        assert quantize(source, out, "q8_0", *words) == 130


@pytest.mark.parametrize("changed", ["options", "threads", "source", "bytes", "record", "cut"])
def test_partial_files_are_continued_only_if_they_are_right(changed, source, tmp_path, capsys):
    out, whole, words, kind = tmp_path / "out.gguf", tmp_path / "whole.gguf", ("-t", "2"), "q8_0"
    interrupt(source, out)
    partial, record = (Path(name) for name in conversion.list_partial_files(out))
    message, other = "continue after ", "has no complete tensor of this model and these options; start from the first"
    if changed == "options":
        kind, message = "q5_1", other
    elif changed == "threads":
        words = ("-t", "3")
    elif changed == "source":
        os.utime(source, ns=(1, 1))
        message = other
    elif changed == "bytes":  # a byte of the second tensor; the first one stays
        ends = [int(line.split()[0]) for line in record.read_text().splitlines()[1:]]
        data = bytearray(partial.read_bytes())
        data[ends[1] - 40] ^= 1
        partial.write_bytes(data)
        message = "continue after 1 of 11"
    elif changed == "record":  # killed while the last line was written
        lines = record.read_bytes().splitlines(keepends=True)
        record.write_bytes(b"".join(lines)[:-9])
        message = f"continue after {len(lines) - 2} of 11"
    elif changed == "cut":  # a crash of the machine has lost the last bytes
        os.truncate(partial, partial.stat().st_size - 9)
    capsys.readouterr()
    assert main(["quantize", str(source), str(out), kind, *words]) == 0
    assert message in capsys.readouterr().err
    assert quantize(source, whole, kind) == 0
    assert out.read_bytes() == whole.read_bytes()
    assert not partial.exists()
    assert not record.exists()


def test_a_pipe_gets_the_file_and_no_partial_file(source, tmp_path):
    assert quantize(source, tmp_path / "whole.gguf", "q8_0") == 0
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        content = pool.submit(pipe.read_bytes)
        assert quantize(source, pipe, "q8_0") == 0
        assert content.result(60) == (tmp_path / "whole.gguf").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["model.gguf", "pipe", "whole.gguf"]


@pytest.mark.parametrize("suffix", [".partial", ".partial.record"])
def test_a_file_of_another_program_with_the_name_of_a_partial_file_stays(suffix, source, tmp_path, capsys):
    other = tmp_path / f"out.gguf{suffix}"
    other.write_bytes(b"mine")
    line = refusal(capsys, source, tmp_path / "out.gguf", "q8_0")
    assert line == f"hocket: {other}: is not of an interrupted run; remove it"
    assert other.read_bytes() == b"mine"
    model = source.rename(tmp_path / "out.gguf.partial")
    assert "would replace a file that is read here" in refusal(capsys, model, tmp_path / "out.gguf", "q8_0")


def test_one_process_writes_a_file_at_a_time(source, tmp_path, capsys):
    with resuming(tmp_path / "out.gguf", "0" * 64):
        line = refusal(capsys, source, tmp_path / "out.gguf", "q8_0")
    assert "another process is writing this file; wait for its end" in line


KILLED = """
import os, sys
from hocket.cli import main
from hocket.frontends.quantisation import conversion
write, calls = conversion.write_padded_tensor, iter(range(1000))
def write_or_die(file, tensor, parts, alignment):
    if next(calls) == int(sys.argv[1]):
        file.write(b"half of a tensor" * 1000)
        os.kill(os.getpid(), 9)
    write(file, tensor, parts, alignment)
conversion.write_padded_tensor = write_or_die
main(["quantize", *sys.argv[2:], "-t", "2"])
"""


@pytest.mark.long
def test_a_killed_conversion_is_continued_to_the_same_bytes(source, tmp_path, capsys):
    out, whole = tmp_path / "out.gguf", tmp_path / "whole.gguf"
    for calls, complete in ((3, 3), (4, 7), (0, 7)):  # tensors of each run before it is killed, and of all runs
        words = [sys.executable, "-c", KILLED, str(calls), str(source), str(out), "q4_1"]
        assert subprocess.run(words, capture_output=True, timeout=300).returncode == -9
        _, *lines = (tmp_path / "out.gguf.partial.record").read_text().splitlines()
        assert len(lines) == complete
        assert not out.exists()
    assert quantize(source, out, "q4_1") == 0
    assert "continue after 7 of 11 tensors" in capsys.readouterr().err
    assert quantize(source, whole, "q4_1") == 0
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["model.gguf", "out.gguf", "whole.gguf"]


def test_parts_and_threads_do_not_change_the_file(source, tmp_path, monkeypatch):
    assert quantize(source, tmp_path / "whole.gguf", "q4_0") == 0
    monkeypatch.setattr(conversion, "PART_ELEMENTS", 96)
    assert main(["quantize", str(source), str(tmp_path / "parts.gguf"), "q4_0", "-t", "5"]) == 0
    assert (tmp_path / "parts.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def write_tensors(path: Path, tensors: dict[str, np.ndarray], **keys: int) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    for key, value in keys.items():
        (writer.add_uint32 if value < 2**32 else writer.add_uint64)(key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.long
def test_memory_is_bounded_by_parts_and_not_by_tensors(tmp_path):
    big = np.random.default_rng(0).standard_normal((4096, 2048)).astype(np.float32)
    path = write_tensors(tmp_path / "big.gguf", {"blk.0.ffn_up.weight": big})
    quantize(path, tmp_path / "out.gguf", "q4_k")
    tracemalloc.start()
    assert quantize(path, tmp_path / "out.gguf", "q4_k") == 0
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    parts = 2 * (conversion.PARTS_PER_THREAD + 1) + 1
    assert peak < parts * conversion.PART_ELEMENTS * 144 // 256 + 4 * (1 << 20) < big.nbytes // 2


@pytest.mark.long
def test_each_expert_has_its_own_importances(tmp_path, capsys):
    rng = np.random.default_rng(1)
    experts = rng.standard_normal((3, 16, 256)).astype(np.float32)
    name = "blk.0.ffn_up_exps.weight"
    path = write_tensors(tmp_path / "moe.gguf", {name: experts, "token_embd.weight": experts[0]})
    sums = (rng.random((3, 256)) ** 3 * 7).astype(np.float32)
    counts = np.array([[7], [0], [7]], np.float32)
    matrix = write_tensors(tmp_path / "imatrix.gguf", {f"{name}.in_sum2": sums, f"{name}.counts": counts})
    assert quantize(path, tmp_path / "out.gguf", "q4_k", "--imatrix", matrix) == 0
    assert "has no importances for token_embd.weight\n" in capsys.readouterr().err
    out = open_gguf(tmp_path / "out.gguf")
    want = [
        conversion.quantise_rows(experts[i], DType.Q4_K, np.ones(256, np.float32) if i == 1 else sums[i] / 7)
        for i in range(3)
    ]
    assert np.array_equal(out.tensor(name).stored_elements, np.stack(want))
    assert out.metadata["quantize.imatrix.file"] == "imatrix.gguf"
    assert out.metadata["quantize.imatrix.entries_count"] == 1


def test_importances_that_do_not_fit_are_refused(tmp_path, capsys):
    weight = np.ones((4, 256), np.float32)
    model = write_tensors(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": weight})
    matrix, name = tmp_path / "i.gguf", "blk.0.ffn_up.weight"
    for sums, problem in (
        (np.ones((1, 255), np.float32), "have shape [1, 255], but the weight needs [1, 256]"),
        (np.full((1, 256), np.nan, np.float32), "has a number that is infinite, NaN or negative"),
        (np.full((1, 256), -1, np.float32), "has a number that is infinite, NaN or negative"),
        (np.ones((1, 256), np.float16), "and its counts are f16 and f32; need f32"),
    ):
        write_tensors(matrix, {f"{name}.in_sum2": sums, f"{name}.counts": np.ones((1, 1), np.float32)})
        assert problem in refusal(capsys, model, tmp_path / "out.gguf", "q4_k", "--imatrix", matrix)
    write_tensors(matrix, {f"{name}.in_sum2": weight[:1], f"{name}.counts": np.full((1, 1), -1, np.float32)})
    line = refusal(capsys, model, tmp_path / "out.gguf", "q4_k", "--imatrix", matrix)
    assert "has a number that is infinite, NaN or negative" in line
    sums = {f"{name}.in_sum2": weight[:1], f"{name}.counts": np.ones((1, 1), np.float32)}
    write_tensors(matrix, sums, **{"imatrix.chunk_count": 2**32})
    line = refusal(capsys, model, tmp_path / "out.gguf", "q4_k", "--imatrix", matrix)
    assert "imatrix.chunk_count is 4294967296; need 0 to 4294967295" in line
    assert "is no importance matrix; convert" in refusal(capsys, model, tmp_path / "o.gguf", "q4_k", "--imatrix", model)
    assert "q2_K in type Q2_K_S needs importances of its columns" in refusal(
        capsys, model, tmp_path / "out.gguf", "q2_k_s"
    )


@pytest.mark.parametrize("link", [False, True], ids=["file", "link"])
def test_the_importance_matrix_is_not_replaced(link, tmp_path, capsys):
    weight, name = np.ones((4, 256), np.float32), "blk.0.ffn_up.weight"
    model = write_tensors(tmp_path / "m.gguf", {name: weight})
    sums = {f"{name}.in_sum2": weight[:1], f"{name}.counts": np.ones((1, 1), np.float32)}
    matrix = write_tensors(tmp_path / "i.gguf", sums)
    before, out = matrix.read_bytes(), tmp_path / "out.gguf" if link else matrix
    if link:
        out.symlink_to(matrix)
    assert str(out) in refusal(capsys, model, out, "q4_k", "--imatrix", matrix)
    assert matrix.read_bytes() == before


@pytest.mark.long
def test_few_bits_need_importances_except_in_a_dry_run(tmp_path, capsys):
    weight = np.random.default_rng(7).standard_normal((4, 256)).astype(np.float32)
    name, out = "blk.0.ffn_up.weight", tmp_path / "out.gguf"
    model = write_tensors(tmp_path / "m.gguf", {name: weight, "token_embd.weight": weight})
    for kind in ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq3_xxs"):
        line = refusal(capsys, model, out, kind)
        assert f"tensor {name}: {kind} in type {kind.upper()} needs importances of its columns; make them" in line
    assert quantize(model, out, "iq2_xs", "--dry-run") == 0
    assert not out.exists()
    sums = {f"{name}.in_sum2": np.ones((1, 256), np.float32), f"{name}.counts": np.ones((1, 1), np.float32)}
    matrix = write_tensors(tmp_path / "i.gguf", sums)
    other = matrix.rename(tmp_path / os.fsdecode(b"i\xff.gguf"))
    assert quantize(model, out, "iq2_xs", "--imatrix", other) == 0
    assert open_gguf(out).tensor(name).dtype is DType.IQ2_XS
    assert open_gguf(out).metadata["quantize.imatrix.file"] == "i?.gguf"
    assert quantize(model, out, "q1_0") == 0


def test_a_split_model_is_written_as_one_file_or_in_as_many_files(tmp_path):
    rng = np.random.default_rng(2)
    weights = {f"blk.0.ffn_{name}.weight": rng.standard_normal((8, 64)).astype(np.float32) for name in ("up", "down")}
    for number, (name, weight) in enumerate(weights.items()):
        part = tmp_path / f"m-{number + 1:05d}-of-00002.gguf"
        writer = gguf.GGUFWriter(part, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", 2)
        writer.add_tensor(name, weight)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    first = tmp_path / "m-00001-of-00002.gguf"
    assert quantize(first, tmp_path / "one.gguf", "q8_0") == 0
    assert quantize(first, tmp_path / "two.gguf", "q8_0", "--keep-split") == 0
    one, two = open_gguf(tmp_path / "one.gguf"), open_gguf(tmp_path / "two-00002-of-00002.gguf")
    assert len(two.part_paths) == 2
    assert "split.count" not in one.metadata
    for name in weights:
        assert np.array_equal(one.tensor(name).stored_elements, two.tensor(name).stored_elements)
    assert "general.file_type" not in read_encoded_metadata_pairs(two.part_paths[1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("q4_k_m --tensor-type ffn", "got 'ffn'; need a pattern and a dtype, as in ffn_down=q6_k"),
        ("q4_k_m --tensor-type (=q8_0", "'(' is no regular expression"),
        ("q4_k_m --tensor-type a=q9_0", "'q9_0' is no dtype of weights; did you mean q"),
        ("q4_k_m --tensor-type a=q8", "'q8' is no dtype of weights; did you mean q8_0"),
        ("q4_k_m --output-tensor-type q8_1", "q8_1 has no quantiser; need a dtype as q8_0 or q4_k"),
        ("q4_k_m -t 0", "got '0'; need an integer of at least 1"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(words, message, capsys):
    with pytest.raises(SystemExit):
        main(["quantize", "in.gguf", "out.gguf", *words.split()])
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_folders_and_types_are_checked_before_the_work(source, tmp_path, capsys):
    assert "type NVFP4: it is a dtype of tensors" in refusal(capsys, source, tmp_path / "out.gguf", "nvfp4")
    assert "No such file or directory" in refusal(capsys, source, tmp_path / "no" / "out.gguf", "q8_0")
    content, link = source.read_bytes(), tmp_path / "link.gguf"
    link.symlink_to(source)
    assert "would replace a file that is read here" in refusal(capsys, source, link, "q8_0")
    assert source.read_bytes() == content
