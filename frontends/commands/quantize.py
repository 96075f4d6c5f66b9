"""``hocket quantize``, as in ``llama-quantize``: a model file with other weight dtypes."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ...backends.progress_bar import open_progress_bar
from ...graph.dtypes import DTYPE_BY_NAME, DType
from ...graph.storage.files import require_writable
from ...graph.validation import did_you_mean
from ..flag_values import parse_positive
from ..gguf.mapped_file import format_name_for_message
from ..open_model import open_model_file
from ..quantisation.conversion import ConversionPlan, TensorConversion, plan_conversion, write_model
from ..quantisation.file_types import FILE_TYPES, find_writable_dtype, parse_file_type
from ..quantisation.importance import read_gguf_importance_matrix
from ..quantisation.type_choice import TypeRequest
from ..terminal.compile_progress import show_compile_progress
from ..terminal.output import write_line_to_stderr, write_to_stdout_unless_closed

MEBIBYTE = 1 << 20


def add_flags(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add(
        "model",
        metavar="IN",
        help="Hugging Face folder or GGUF file of f32, f16 or bf16 weights; of several files the first one",
    )
    add("output", metavar="OUT", help="GGUF file to write")
    add("type", metavar="TYPE", help=describe_file_types_grouped_by_bits())
    add("--pure", action="store_true", help="give all matrices the same dtype, without the mixture of the type")
    add(
        "--tensor-type",
        type=parse_regex_and_dtype,
        action="append",
        default=[],
        metavar="REGEX=DTYPE",
        help="dtype of tensors with a matching name, as 'ffn_down=q6_k'. May be repeated; the first match applies",
    )
    add("--output-tensor-type", type=parse_writable_dtype_name, metavar="DTYPE", help="dtype of the output matrix")
    add("--token-embedding-type", type=parse_writable_dtype_name, metavar="DTYPE", help="dtype of the token embedding")
    add("--leave-output-tensor", action="store_true", help="keep the dtype of output.weight")
    add(
        "--imatrix",
        metavar="FILE",
        help="importance matrix of hocket imatrix; errors of important columns count more",
    )
    add("--allow-requantize", action="store_true", help="quantise weights that are quantised already")
    add("--keep-split", action="store_true", help="write as many files as the model has")
    add("--dry-run", action="store_true", help="print the dtypes and the size, and write nothing")
    add("-t", "--threads", type=parse_positive, metavar="N", help="threads (all processors)")


def describe_file_types_grouped_by_bits() -> str:
    """Return the types as text, grouped by the bits in their names."""
    groups: dict[str, list[str]] = {}
    for name in FILE_TYPES:
        bits = next(c for c in name if c.isdigit())
        groups.setdefault(f"{bits} bits" if FILE_TYPES[name].dtype.is_quantised else "Floats", []).append(name)
    return "type of the file. " + ". ".join(f"{title}: {', '.join(names)}" for title, names in groups.items())


def parse_writable_dtype_name(text: str) -> DType:
    """Return the dtype of a name in any case that can be written; raise `argparse.ArgumentTypeError` for another."""
    dtype = find_writable_dtype(text)
    if dtype is None:
        names = {name.lower(): name for name in DTYPE_BY_NAME}
        if text.lower() in names:
            raise argparse.ArgumentTypeError(f"{names[text.lower()]} has no quantiser; need a dtype as q8_0 or q4_k")
        writable = [name for name in names if find_writable_dtype(name) is not None]
        hint = did_you_mean(text.lower(), writable) or "; need a dtype as q8_0 or q4_k"
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no dtype of weights{hint}")
    return dtype


def parse_regex_and_dtype(text: str) -> tuple[re.Pattern[str], DType]:
    """Return a pattern and a dtype of ``REGEX=DTYPE``; raise `argparse.ArgumentTypeError` for another text."""
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern:
        raise argparse.ArgumentTypeError(f"got {text!r:.80}; need a pattern and a dtype, as in ffn_down=q6_k")
    try:
        return re.compile(pattern), parse_writable_dtype_name(name)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{pattern!r:.80} is no regular expression ({error})") from None


@show_compile_progress()
def run(args: argparse.Namespace) -> int:
    file_type, model = parse_file_type(args.type), open_model_file(args.model)
    request = TypeRequest(
        file_type,
        is_pure=args.pure,
        overrides=args.tensor_type,
        output_dtype=args.output_tensor_type,
        embedding_dtype=args.token_embedding_type,
        keeps_output=args.leave_output_tensor,
    )
    importance = read_gguf_importance_matrix(args.imatrix) if args.imatrix else None
    if not args.dry_run:
        require_writable(args.output)
    plan = plan_conversion(
        model, request, importance, requantises=args.allow_requantize or args.dry_run, is_dry_run=args.dry_run
    )
    _print_changed_dtypes_and_missing_importances(plan)
    if args.dry_run:
        write_to_stdout_unless_closed(describe_plan_dtypes_and_sizes(plan, every_tensor=True))
        return 0
    with open_progress_bar(total=plan.element_count, desc="quantize", unit="w", unit_scale=True) as bar:

        def write_line_above_bar(line: str) -> None:
            with bar.external_write_mode(file=sys.stderr):
                write_line_to_stderr(line)

        paths = write_model(
            plan,
            Path(args.output),
            threads=args.threads or os.cpu_count() or 1,
            keeps_split=args.keep_split,
            report=bar.update,
            notify=write_line_above_bar,
        )
    names = f"{paths[0]} to {paths[-1].name}" if len(paths) > 1 else str(paths[0])
    write_to_stdout_unless_closed(f"{names}\n{describe_plan_dtypes_and_sizes(plan, every_tensor=False)}")
    return 0


def _print_changed_dtypes_and_missing_importances(plan: ConversionPlan) -> None:
    """Print the tensors that have another dtype because of their shape, and weights without importances."""
    for (required, dtype), cases in group_unfitting_tensors_by_dtypes(plan).items():
        write_line_to_stderr(
            f"{format_first_name_and_count(cases)}: {required} needs rows of a multiple of {required.block}, "
            f"got {cases[0].tensor.shape[-1]}; stored as {dtype}"
        )
    missing = plan.list_conversions_without_importance()
    if missing and plan.importance is not None:
        file = format_name_for_message(str(plan.importance.path))
        write_line_to_stderr(f"{file}: has no importances for {format_first_name_and_count(missing)}")


def format_first_name_and_count(conversions: Sequence[TensorConversion]) -> str:
    """Return the name of the first tensor, and how many tensors follow it."""
    more = f" and {len(conversions) - 1} more" if len(conversions) > 1 else ""
    return f"{conversions[0].tensor.name}{more}"


def group_unfitting_tensors_by_dtypes(plan: ConversionPlan) -> dict[tuple[DType, DType], list[TensorConversion]]:
    """Group the conversions that cannot make the required dtype, by the pair of required and actual dtype."""
    groups: dict[tuple[DType, DType], list[TensorConversion]] = {}
    for c in plan.list_unfitting_conversions():
        groups.setdefault((c.required, c.dtype), []).append(c)
    return groups


def describe_plan_dtypes_and_sizes(plan: ConversionPlan, *, every_tensor: bool) -> str:
    """Return the dtypes and the sizes of a plan as text."""
    lines = []
    if every_tensor:
        for c in plan.conversions:
            shape = "×".join(map(str, c.tensor.shape))
            lines.append(f"{c.tensor.name}  {shape}  {c.tensor.dtype} -> {c.dtype}")
    elements: Counter[DType] = Counter()
    for c in plan.conversions:
        elements[c.dtype] += c.element_count
    share = ", ".join(f"{dtype} {count / plan.element_count:.1%}" for dtype, count in elements.most_common())
    lines.append(f"weights: {share}")
    for title, nbytes in (("before", plan.source_bytes), ("after", plan.nbytes)):
        bits = 8 * nbytes / plan.element_count
        lines.append(f"{title}: {nbytes / MEBIBYTE:.1f} MiB, {bits:.2f} bits per weight")
    return "\n".join(lines) + "\n"
