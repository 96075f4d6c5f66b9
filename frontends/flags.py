"""The flags of every subcommand, and how each is read; errors of usage are one line."""

from __future__ import annotations

import argparse
from functools import partial
from typing import NoReturn

CHUNK = 512
"""Tokens evaluated in one run, and tokens of context in measuring perplexity, unless asked otherwise."""
NEW_TOKENS = 128
DEVICES = "where to run, as cpu:0,cpu:1; parts of one device are cuda:0.0,cuda:0.1 (cpu:0)"
PASSES = ("graph", "factors", "layouts", "shards", "memory", "steps")
"""What `hocket plan` can show; each is a key of `scheduler.listing.PASSES`, which need not be loaded to read flags."""


def one_line(text: str) -> str:
    """A message as one line that no terminal takes for commands, whatever names it quotes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Parser(argparse.ArgumentParser):
    """Wrong usage costs one line, as every other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message)}; see {self.prog} --help\n")


def session_flags(sub: argparse.ArgumentParser) -> None:
    """What every command that runs a model takes."""
    sub.add_argument("--devices", default="cpu:0", metavar="LIST", help=DEVICES)
    share_flags(sub)
    sub.add_argument("--exact", action="store_true", help="float32 throughout, in plain NumPy: slower")
    wire_flag(sub)
    sub.add_argument("--fast", action="store_true", help="bfloat16 in the delta rule's products, where that is faster")
    context_flag(sub)
    sub.add_argument("-b", "--batch-size", dest="batch", type=positive, default=CHUNK, metavar="N", help="tokens a run")
    sub.add_argument(
        "-t", "--threads", type=positive, metavar="N", help="threads of each device (its share of the processors)"
    )
    sub.add_argument("--cache-dir", metavar="DIR", help="where compiled kernels are kept (~/.cache/hocket)")
    sub.add_argument("--seed", type=natural, default=0, metavar="N", help="seed of the sampling (0)")


def share_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--split-mode", default="auto", metavar="MODE", help="how several devices share: none, layer, tensor or auto"
    )
    sub.add_argument("--tensor-split", type=shares, default=(), metavar="LIST", help="shares of the devices, as 3,1")
    sub.add_argument(
        "--place",
        type=placement,
        action="append",
        default=[],
        metavar="REGEX=DEVICE",
        help="run nodes of this name, and those that read weights or states of this name, on one device, as "
        "'ffn_up=cpu:1'; may be repeated, the first that matches counts",
    )


def wire_flag(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--wire", choices=("f32", "bf16"), default="f32", help="what large sums are sent in between GPUs (f32)"
    )


def context_flag(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("-c", "--ctx-size", dest="context", type=positive, metavar="N", help="tokens of context")


def run_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", nargs="?", metavar="MODEL", help="GGUF file (the small model that comes with hocket)")
    text = sub.add_mutually_exclusive_group()
    text.add_argument("-p", "--prompt", metavar="TEXT", help="text to continue")
    text.add_argument("-f", "--file", metavar="FILE", help="file with the text to continue, - for stdin")
    sub.add_argument(
        "-n", "--predict", type=int, metavar="N", help="new tokens, -1: until the context is full (128; --chat: -1)"
    )
    sub.add_argument("--temp", type=float, default=0.0, metavar="T", help="temperature; 0 takes the likeliest (0)")
    sub.add_argument("--top-k", type=int, default=40, metavar="K", help="keep the K likeliest, 0: all (40)")
    sub.add_argument("--top-p", type=float, default=0.95, metavar="P", help="keep the likeliest up to P in sum (0.95)")
    sub.add_argument("--min-p", type=float, default=0.05, metavar="P", help="keep those above P times the best (0.05)")
    sub.add_argument("--chat", action="store_true", help="use the chat template; on a terminal /exit ends the talk")
    sub.add_argument("--save-state", metavar="FILE", help="keep the session's state, to go on later")
    sub.add_argument("--load-state", metavar="FILE", help="go on from a saved state, on any number of devices")
    sub.add_argument("--ignore-eos", action="store_true", help="go on after an end token")


def logits_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help="GGUF file")
    text = sub.add_mutually_exclusive_group(required=True)
    text.add_argument("--tokens", type=token_list, metavar="IDS", help="token ids, as 1,2,3")
    text.add_argument("--tokens-file", metavar="FILE", help=".npy file of token ids")
    text.add_argument("-p", "--prompt", metavar="TEXT", help="text to tokenize")
    sub.add_argument("--out", required=True, metavar="FILE", help=".npy file to write: float32 [tokens, vocabulary]")
    sub.add_argument("--step", action="store_true", help="half of the tokens at once, the rest one by one")


def tokenize_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help="GGUF file, of which only the header is read")
    sub.add_argument("-p", "--prompt", required=True, metavar="TEXT", help="text to tokenize")
    sub.add_argument("--add-special", action="store_true", help="add BOS and EOS as the model asks")
    sub.add_argument("--parse-special", action="store_true", help="read the text of a special token as that token")
    sub.add_argument("--json", action="store_true", help="print a list of ids")


def bench_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help="GGUF file")
    add = partial(sub.add_argument, type=number_list, metavar="LIST")
    add("-p", "--n-prompt", dest="prompts", default=[512], help="tokens of prompts (512)")
    add("-n", "--n-gen", dest="new", default=[128], help="new tokens (128)")
    add("-d", "--n-depth", dest="depths", default=[0], help="tokens before what is timed (0)")
    add("-t", "--threads", dest="counts", help="threads of each device, in turn (its share of the processors)")
    sub.add_argument("-r", "--repetitions", type=positive, default=5, metavar="N", help="timed runs of each test (5)")
    sub.add_argument("-b", "--batch-size", dest="batch", type=positive, default=CHUNK, metavar="N", help="tokens a run")
    sub.add_argument("--devices", default="cpu:0", metavar="LIST", help=DEVICES)
    share_flags(sub)
    wire_flag(sub)
    sub.add_argument("-o", "--output", choices=("md", "json", "jsonl"), default="md", help="how to print (md)")
    sub.add_argument("--profile", action="store_true", help="print how long each kernel takes in a run instead")


def perplexity_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help="GGUF file")
    sub.add_argument("file", metavar="FILE", help="text in UTF-8, - for stdin")
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def dump_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL|GRAPH", help="GGUF file (only its header is read), or a dumped graph")
    sub.add_argument("--format", choices=("text", "json", "dot"), default="text", help="text and json read back (text)")
    sub.add_argument("--layer", type=natural, metavar="N", help="only this layer, what it reads as inputs")
    context_flag(sub)
    sub.add_argument(
        "-b", "--batch-size", dest="batch", type=positive, default=1, metavar="N", help="new tokens of the step (1)"
    )


def plan_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL|GRAPH", help="GGUF file (only its header is read), or a dumped graph")
    where = sub.add_mutually_exclusive_group()
    where.add_argument("--devices", default="cpu:0", metavar="LIST", help=DEVICES)
    where.add_argument("--simulate", metavar="SPEC", help="devices that are not there, as h200:8,nvlink or rtx3090:2")
    share_flags(sub)
    context_flag(sub)
    sub.add_argument(
        "-b", "--batch-size", dest="batch", type=positive, default=CHUNK, metavar="N", help="tokens of a prefill (512)"
    )
    sub.add_argument("--phase", choices=("decode", "prefill"), default="decode", help="one token, or a batch (decode)")
    sub.add_argument("--steps", action="store_true", help="list every instruction of every device too")
    sub.add_argument("--show", choices=PASSES, help="print what one pass made instead of the explanation")
    sub.add_argument("--diff", metavar="PLAN", help="print what differs from this plan in JSON instead")
    sub.add_argument("--json", action="store_true", help="print the plan as JSON, which --diff reads")
    sub.add_argument("-o", "--out", metavar="FILE", help="write the plan as JSON to a file too")


def devices_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--measure", action="store_true", help="measure memory bandwidth and float32 arithmetic")
    sub.add_argument("--json", action="store_true", help="print a list of objects")


def ops_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--format", choices=("md", "json", "html"), default="md", help="how to print (md)")


def shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; need numbers, as 3,1") from None


def placement(text: str) -> tuple[str, str]:
    pattern, _, device = text.rpartition("=")
    if not pattern or not device:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; need a regular expression and a device, as ffn_up=cpu:1")
    return pattern, device


def token_list(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; need token ids, as 1,2,3") from None


def number_list(text: str) -> list[int]:
    return [natural(part) for part in text.split(",")]


def positive(text: str) -> int:
    return _integer(text, 1)


def natural(text: str) -> int:
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; need an integer of at least {least}")
    return value
