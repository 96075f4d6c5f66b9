"""Command lines of llama.cpp: each flag is accepted with its meaning, or answered with a remedy."""

from __future__ import annotations

import argparse
import re

import pytest

from hocket.cli import build_parser_for_command, main
from hocket.frontends.commands import COMMAND_HELP
from hocket.frontends.gguf import open_gguf
from hocket.frontends.terminal.llama_cpp import COMMAND_OF_PROGRAM, FLAGS, find_llama_cpp_program_replacement

from ...given.models.goldens import TINY, path_of

COMMON = """
-h --help --usage --version -cl --cache-list --completion-bash -t --threads -tb --threads-batch -C --cpu-mask -Cr
--cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --prio-batch
--poll-batch -c --ctx-size -b --batch-size -ub --ubatch-size --keep --swa-full -fa --flash-attn -p --prompt --perf
--no-perf -f --file -bf --binary-file -e --escape --no-escape --rope-scaling --rope-scale --rope-freq-base
--rope-freq-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast -kvo
--kv-offload -nkvo --no-kv-offload --repack -nr --no-repack --no-host -ctk --cache-type-k -ctv --cache-type-v -dt
--defrag-thold -np --parallel --rpc --mlock --mmap --no-mmap -dio --direct-io -ndio --no-direct-io -lm --load-mode
--numa -dev --device --list-devices -ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ngl --gpu-layers
--n-gpu-layers -sm --split-mode -ts --tensor-split -mg --main-gpu -fit --fit -fitt --fit-target -fitc --fit-ctx
--check-tensors --override-kv --op-offload --no-op-offload --lora --lora-scaled --control-vector
--control-vector-scaled --control-vector-layer-range -m --model -mu --model-url -dr --docker-repo -hf -hfr --hf-repo
-hff --hf-file -hft --hf-token --log-disable --log-file --log-colors -v --verbose --log-verbose --offline -lv
--verbosity --log-verbosity --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps --warmup --no-warmup
--log-jsonl --no-log-jsonl -ncffn --n-cpu-ffn -lzm --lazy-mode --video-fps --video-timestamp-interval
--video-ffmpeg-dir
"""
CLI = """
-n --predict --n-predict --samplers -s --seed --sampler-seq --sampling-seq --ignore-eos --temp --temperature --top-k
--top-p --min-p --top-nsigma --top-n-sigma --xtc-probability --xtc-threshold --typical --typical-p --repeat-last-n
--repeat-penalty --presence-penalty --frequency-penalty --dry-multiplier --dry-base --dry-allowed-length
--dry-penalty-last-n --dry-sequence-breaker --adaptive-target --adaptive-decay --dynatemp-range --dynatemp-exp
--mirostat --mirostat-lr --mirostat-ent -l --logit-bias --grammar --grammar-file -j --json-schema -jf
--json-schema-file -bs --backend-sampling --verbose-prompt --display-prompt --no-display-prompt -co --color
--context-shift --no-context-shift -sys --system-prompt --show-timings --no-show-timings -sysf --system-prompt-file -r
--reverse-prompt -sp --special -cnv --conversation -no-cnv --no-conversation -st --single-turn -mli --multiline-input
-mm --mmproj --image --audio -o --output --chat-template-kwargs --jinja --no-jinja --reasoning-format -rea --reasoning
--reasoning-budget --chat-template --chat-template-file --simple-io -hfd --hf-repo-draft -td --threads-draft -tbd -ctkd
--cache-type-k-draft -ctvd -otd -cmoed -ncmoed --draft --draft-n --draft-max --draft-min --draft-p-min --draft-p-split
-devd -ngld --n-gpu-layers-draft -md --model-draft --spec-type --spec-draft-n-max --spec-draft-n-min -i --interactive
-if --interactive-first --in-prefix --in-suffix --in-prefix-bos --prompt-cache --prompt-cache-all --prompt-cache-ro
-ptc --print-token-count -gan --grp-attn-n -gaw --grp-attn-w --license --spec-draft-sampling --spec-synth-len
--spec-synth-rates
"""
BENCH = """
-h --help --numa -r --repetitions --prio --delay -o --output -oe --output-err --list-devices -v --verbose --progress
--no-warmup -fitt --fit-target -fitc --fit-ctx -rpc --rpc -m --model -hf -hfr --hf-repo -hff --hf-file -hft --hf-token
--offline -p --n-prompt -n --n-gen -pg -d --n-depth -b --batch-size -ub --ubatch-size -ctk --cache-type-k -ctv
--cache-type-v -t --threads -C --cpu-mask --cpu-strict --poll -ngl --n-gpu-layers -ncmoe --n-cpu-moe -sm --split-mode
-mg --main-gpu -nkvo --no-kv-offload -fa --flash-attn -dev --device -lm --load-mode -mmp --mmap -dio --direct-io -embd
--embeddings -ts --tensor-split -ot --override-tensor -nopo --no-op-offload --no-host --repack
"""
PERPLEXITY = """
--chunks --ppl-stride --ppl-output-type --hellaswag --hellaswag-tasks --winogrande --winogrande-tasks --multiple-choice
--multiple-choice-tasks --kl-divergence --kl-divergence-base --save-all-logits --all-logits -kvu --kv-unified -no-kvu
--no-kv-unified --context-shift --no-context-shift -n --predict --n-predict --samplers -s --seed --sampler-seq
--ignore-eos --temp --temperature --top-k --top-p --min-p --top-n-sigma --xtc-probability --typical --repeat-last-n
--repeat-penalty --presence-penalty --frequency-penalty --dry-multiplier --mirostat -l --logit-bias --grammar
--grammar-file -j --json-schema -jf --json-schema-file -bs --backend-sampling -mm --mmproj --image-max-tokens
"""
FLAGS_OF = {"run": COMMON + CLI, "bench": BENCH, "perplexity": COMMON + PERPLEXITY}
"""The flags of llama-cli and llama-completion, llama-bench and llama-perplexity, from their help."""


def options(command: str) -> dict[str, argparse.Action]:
    """The flags that a command accepts."""
    parser = build_parser_for_command([command])
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(commands.choices[command]._option_string_actions)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that refuses a command line."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    return line


@pytest.mark.long
@pytest.mark.parametrize("command", FLAGS_OF)
def test_every_flag_of_llama_cpp_is_accepted_or_answered_with_a_remedy(command, capsys):
    known = options(command)
    for flag in FLAGS_OF[command].split():
        if flag in known:
            continue
        for words in ((flag,), (flag, "99"), (f"{flag}=99",), ("model.gguf", flag, "1,1")):
            line = refusal(capsys, command, *words)
            assert line.startswith(f"hocket {command}: {flag} is a flag of llama.cpp; "), line


def test_flags_without_a_remedy_are_those_that_commands_accept():
    known = {command: options(command) for command in COMMAND_HELP}
    for flag in FLAGS:
        for letter in flag.programs:
            accepted = [name in known[COMMAND_OF_PROGRAM[letter]] for name in flag.names]
            assert all(accepted) if not flag.remedy else not all(accepted), (flag, letter)


def test_remedies_name_flags_and_commands_that_exist():
    known = {name for command in COMMAND_HELP for name in options(command)} | {"--version"}
    for flag in FLAGS:
        assert {*re.findall(r"(?<![\w-])--?[a-z][\w-]*", flag.remedy)} <= known | {"-c"}, flag
        assert {*re.findall(r"\bhocket ([a-z]+)\b", flag.remedy)} <= {*COMMAND_HELP} | ONLY_WORDS, flag


ONLY_WORDS = {"reads", "downloads", "leaves", "uses", "has", "measures", "quantises"}
"""Verbs with the subject hocket."""


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("run -ngl 99", "layers go to GPUs by --devices cuda:0"),
        ("run -fa on -p hi", "attention is always fused"),
        ("run -hf org/model", "hocket downloads nothing; give a GGUF file with -m"),
        ("run -np 2", "generate_batch of hocket.Model"),
        ("run -mg 0", "name the GPU, as --devices cuda:1"),
        ("bench -m m.gguf -pg 64,16", "give both with -np 1 -p 64 -n 16"),
        ("plan -ngl 99", "layers go to GPUs by --devices cuda:0"),
        ("tokenize m.gguf --color", "nothing is coloured"),
    ],
)
def test_a_flag_of_llama_cpp_is_answered_with_a_remedy(words, answer, capsys):
    assert answer in refusal(capsys, *words.split())


@pytest.mark.parametrize("words", ["run -n5", "run -cfoo", "bench m.gguf -t2", "run -hx", "run -sm=layer5 -nx"])
def test_a_value_is_never_glued_to_a_flag(words, capsys):
    assert "there is no flag '-" in refusal(capsys, *words.split())


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("llama-server", "use hocket serve"),
        ("llama-quantize", "use hocket quantize"),
        ("llama-bench", "use hocket bench"),
        ("convert_hf_to_gguf.py", "use hocket convert FOLDER OUT.gguf"),
    ],
)
def test_a_program_of_llama_cpp_is_answered_with_the_command(word, answer, capsys):
    assert answer in find_llama_cpp_program_replacement(word)
    assert f"there is no command '{word}'; " in (line := refusal(capsys, word))
    assert answer in line


LLAMA_FILE = str(path_of("llama"))


@pytest.mark.parametrize(
    "words",
    [
        ("tokenize", "MODEL", "-p", "It is", "--json"),
        ("dump", "MODEL", "--format", "json"),
        ("plan", "MODEL", "-c", "64", "--json"),
        ("bench", "MODEL", "-p", "4", "-n", "0", "-r", "1", "--profile"),
        ("embed", "MODEL", "-p", "It is", "-c", "0"),
        ("run", "MODEL", "-p", "It is", "-n", "2", "--temp", "0"),
    ],
)
def test_a_model_is_named_with_or_without_a_flag(words, capsys):
    written = []
    for place in range(3):
        arguments = [word for word in words if word != "MODEL"]
        arguments[1:1] = [TINY] if place == 0 else ["-m", TINY] if place == 1 else []
        arguments += [f"--model={TINY}"] if place == 2 else []
        assert main(arguments) == 0
        written.append(capsys.readouterr().out)
    if words[0] != "bench":
        assert written[0] == written[1] == written[2]


@pytest.mark.long
def test_perplexity_takes_model_and_text_by_flags_in_any_order(capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged. " * 20, "utf-8")
    lines = set()
    for words in (
        [TINY, str(text)],
        ["-m", TINY, str(text)],
        [str(text), "-m", TINY],
        ["-f", str(text), "-m", TINY],
        [TINY, "-f", str(text)],
    ):
        assert (
            main(
                ["perplexity", words[0], "-c", "32", *words[1:]]
                if words[0] == TINY
                else ["perplexity", *words, "-c", "32"]
            )
            == 0
        )
        lines.add(capsys.readouterr().out)
    assert len(lines) == 1


def test_two_models_or_none_are_refused(capsys):
    assert "argument -m: got 'a' and 'b'; give one" in refusal(capsys, "run", "-m", "a", "-m", "b")
    assert "there is no place for the argument 'b'" in refusal(capsys, "bench", "-m", "a", "b")
    assert "argument -m: expected one argument" in refusal(capsys, "bench", "-m")
    assert "argument -m: expected one argument" in refusal(capsys, "bench", "-m", "-p", "4")
    assert "required: MODEL" in refusal(capsys, "bench")


def test_a_context_of_zero_is_as_long_as_the_model_allows(capsys):
    length = open_gguf(LLAMA_FILE).metadata["llama.context_length"]
    assert main(["dump", LLAMA_FILE, "-c", "0"]) == 0
    longest = capsys.readouterr().out
    assert main(["dump", LLAMA_FILE, "-c", str(length)]) == 0
    assert capsys.readouterr().out == longest
    assert main(["dump", LLAMA_FILE, "-c", "16"]) == 0
    assert capsys.readouterr().out != longest


def test_a_top_k_of_minus_one_keeps_all_tokens(capsys):
    texts = []
    for count in ("0", "-1", "1"):
        words = ["-p", "It is", "-n", "12", "--temperature", "1.5", "--min-p", "0", "--top-p", "1", "-s", "3"]
        assert main(["run", TINY, *words, "--top-k", count]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
