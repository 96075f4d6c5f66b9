"""The flags and programs of llama.cpp, with their counterparts in hocket.

Messages about wrong command lines use these tables, and ``docs/write_from_llama_cpp.py`` writes a page of them. The
tables have the flags of llama-cli, llama-completion, llama-bench and llama-perplexity of November 2026.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..config_options import list_options
from ..generation.sampling import Sampling
from ..run_config import RunConfig

COMMAND_OF_PROGRAM = {"c": "run", "b": "bench", "p": "perplexity"}
"""The hocket command for llama-cli and llama-completion (``c``), llama-bench (``b``) and llama-perplexity (``p``)."""


@dataclass(frozen=True, slots=True)
class LlamaCppFlag:
    """A command-line flag of llama.cpp: its spellings, the programs that have it, and the remedy in hocket.

    A flag without a remedy is accepted by hocket under all these spellings, with the same meaning.
    """

    names: tuple[str, ...]
    programs: str
    remedy: str = ""


def _parse_flags_and_remedies(programs: str, table: str) -> Iterator[LlamaCppFlag]:
    """Yield a flag for each line ``name name: remedy`` of a table; a line without a colon names accepted flags."""
    for line in table.strip().splitlines():
        names, _, remedy = line.partition(": ")
        yield LlamaCppFlag(tuple(names.split()), programs, remedy)


NO_DOWNLOAD_REMEDY = "hocket downloads nothing; give a GGUF file with -m"
TEXT_ONLY_REMEDY = "hocket reads text only; use llama.cpp for images and sound"
SYSTEM_TOOL_REMEDY = "hocket leaves that to the system; start it with taskset, numactl or nice"
FUSED_ATTENTION_REMEDY = "attention is always fused; leave it out"
MAPPED_WEIGHTS_REMEDY = "weights are always mapped from the file; leave it out"
REDIRECT_REMEDY = "data go to stdout and messages to stderr; redirect them in the shell"
NO_SAMPLER_REMEDY = "there is no such sampler; use --temp, --top-k, --top-p, --min-p and the penalties"
FILE_SETTING_REMEDY = "rotary settings come from the file; change them there (gguf-py's gguf-set-metadata)"
DRAFT_DEVICE_REMEDY = "the draft model runs on the devices and threads of the model; leave it out"
NO_NGRAM_REMEDY = "only draft models (-md) and MTP blocks guess; --draft-max sets the number of tokens"
NO_SYNTHETIC_DRAFT_REMEDY = "tokens are never guessed at random; -md names a draft model"
NO_SAMPLING_REMEDY = "no token is chosen there; leave it out"
PLACE_EXPERTS_REMEDY = "place weights by name, as --place 'ffn_.*_exps=cpu:0'"

COMMON_FLAGS = f"""
-h --help
-m --model
-ngl --gpu-layers --n-gpu-layers: layers go to GPUs by --devices cuda:0
-fa --flash-attn: {FUSED_ATTENTION_REMEDY}
-hf -hfr --hf-repo: {NO_DOWNLOAD_REMEDY}
-hff --hf-file: {NO_DOWNLOAD_REMEDY}
-hft --hf-token: {NO_DOWNLOAD_REMEDY}
--offline: hocket uses no network; leave it out
-mg --main-gpu: name the GPU, as --devices cuda:1
-dev --device: name devices with --devices cuda:0,cuda:1
-ot --override-tensor: place weights by name, as --place 'ffn_up=cpu:0'
-cmoe --cpu-moe: {PLACE_EXPERTS_REMEDY}
-ncmoe --n-cpu-moe: {PLACE_EXPERTS_REMEDY}
-nkvo --no-kv-offload: place caches by name, as --place 'cache_[kv]=cpu:0'
-ub --ubatch-size: -b is the number of tokens in a run
-nr --repack --no-repack: weights are packed for the processor when they are loaded; leave it out
--no-host: leave it out
-lm --load-mode: {MAPPED_WEIGHTS_REMEDY}
-dio --direct-io -ndio --no-direct-io: {MAPPED_WEIGHTS_REMEDY}
-mmp --mmap --no-mmap: {MAPPED_WEIGHTS_REMEDY}
--mlock: {MAPPED_WEIGHTS_REMEDY}
-lzm --lazy-mode: {MAPPED_WEIGHTS_REMEDY}
-rpc --rpc: several machines work together under mpiexec, as --devices cpu:0@0,cpu:0@1
--numa: {SYSTEM_TOOL_REMEDY}
--prio: {SYSTEM_TOOL_REMEDY}
--poll: {SYSTEM_TOOL_REMEDY}
-C --cpu-mask: {SYSTEM_TOOL_REMEDY}
--cpu-strict: {SYSTEM_TOOL_REMEDY}
--list-devices: the command is hocket devices
--no-warmup --warmup: leave it out; compiling is not counted as prefill
-v --verbose --log-verbose: --debug shows the traceback of an error, --watch REGEX the values
-fit --fit: the part that does not fit goes to cpu:0 by itself; hocket plan shows it
-fitt --fit-target: the part that does not fit goes to cpu:0 by itself; hocket plan shows it
-fitc --fit-ctx: the part that does not fit goes to cpu:0 by itself; hocket plan shows it
-nopo --op-offload --no-op-offload: place ops by name, as --place 'ffn_up=cpu:0'
"""

MODEL_FLAGS = f"""
-f --file
--version: the command is hocket --version
--usage: the flag is --help
--license: hocket has the MIT licence; see the file LICENSE
-cl --cache-list: {NO_DOWNLOAD_REMEDY}
--completion-bash: there is no completion script; hocket COMMAND --help lists the flags
-tb --threads-batch: -t counts for prompts and for new tokens
-Cr --cpu-range: {SYSTEM_TOOL_REMEDY}
-Cb --cpu-mask-batch: {SYSTEM_TOOL_REMEDY}
-Crb --cpu-range-batch: {SYSTEM_TOOL_REMEDY}
--cpu-strict-batch: {SYSTEM_TOOL_REMEDY}
--prio-batch: {SYSTEM_TOOL_REMEDY}
--poll-batch: {SYSTEM_TOOL_REMEDY}
--keep: --context-shift keeps the BOS token and forgets the older half
--swa-full: caches of sliding windows are as long as the window; leave it out
--perf --no-perf: the last line tells the speed; hocket bench --profile shows each kernel
-bf --binary-file: texts are UTF-8; convert the file, and give it with -f
-e --escape --no-escape: the shell writes escapes, as -p $'two\\nlines'
--rope-scaling: {FILE_SETTING_REMEDY}
--rope-scale: {FILE_SETTING_REMEDY}
--rope-freq-base: {FILE_SETTING_REMEDY}
--rope-freq-scale: {FILE_SETTING_REMEDY}
--yarn-orig-ctx: {FILE_SETTING_REMEDY}
--yarn-ext-factor: {FILE_SETTING_REMEDY}
--yarn-attn-factor: {FILE_SETTING_REMEDY}
--yarn-beta-slow: {FILE_SETTING_REMEDY}
--yarn-beta-fast: {FILE_SETTING_REMEDY}
-gan --grp-attn-n: hocket has no self-extend; a context as long as the model's is -c 0
-gaw --grp-attn-w: hocket has no self-extend; a context as long as the model's is -c 0
-kvo --kv-offload: caches are on the device of their layer; leave it out
-dt --defrag-thold: caches have no holes; leave it out
-np --parallel: hocket serve -np answers several requests at once, and so does generate_batch of hocket.Model
-ns --sequences: hocket serve -np answers several requests at once, and so does generate_batch of hocket.Model
--check-tensors: hocket check --from-graph MODEL checks every kernel of a model
--override-kv: metadata come from the file; change them there (gguf-py's gguf-set-metadata)
--lora-scaled: the flag is --lora FILE:SCALE
--control-vector-scaled: the flag is --control-vector FILE:SCALE
-mu --model-url: {NO_DOWNLOAD_REMEDY}
-dr --docker-repo: {NO_DOWNLOAD_REMEDY}
--log-disable: {REDIRECT_REMEDY}
--log-file: {REDIRECT_REMEDY}
--log-colors: nothing is coloured; leave it out
--log-prefix --no-log-prefix: {REDIRECT_REMEDY}
--log-timestamps --no-log-timestamps: {REDIRECT_REMEDY}
--log-jsonl --no-log-jsonl: {REDIRECT_REMEDY}
-ncffn --n-cpu-ffn: place weights by name, as --place 'ffn_.*=cpu:0'
--video-fps: {TEXT_ONLY_REMEDY}
--video-timestamp-interval: {TEXT_ONLY_REMEDY}
--video-ffmpeg-dir: {TEXT_ONLY_REMEDY}
-lv --verbosity --log-verbosity: --debug shows the traceback of an error, --watch REGEX the values
-ctkd --cache-type-k-draft --spec-draft-type-k: {DRAFT_DEVICE_REMEDY}
-ctvd --cache-type-v-draft --spec-draft-type-v: {DRAFT_DEVICE_REMEDY}
"""

CLI_FLAGS = f"""
-p --prompt
-s --seed
-n --predict --n-predict
--ignore-eos
--grammar
--grammar-file
-j --json-schema
-r --reverse-prompt
-sys --system-prompt
--context-shift
-cnv --conversation
-no-cnv --no-conversation: leave it out; a text is continued unless --chat is given
-st --single-turn: give the message with --chat and -p or -f; one answer follows
-i --interactive: the flag is --chat; messages are typed on a terminal
-if --interactive-first: the flag is --chat; messages are typed on a terminal
-mli --multiline-input: in --chat, Alt+Enter begins a new line, and pasted lines are one message
-sysf --system-prompt-file: the shell reads a file, as -sys "$(cat FILE)"
-jf --json-schema-file: the shell reads a file, as -j "$(cat FILE)"
--no-context-shift: leave it out; a full context ends the text unless --context-shift is given
-co --color: nothing is coloured; leave it out
--simple-io: leave it out; piped output is plain
--verbose-prompt: hocket tokenize prints the tokens of a text
-ptc --print-token-count: the last line tells the tokens, /stats does in a talk
--display-prompt --no-display-prompt: --chat writes the answer alone
-sp --special: special tokens are not written; hocket tokenize --parse-special shows them
--show-timings --no-show-timings: the last line tells the speed, on stderr
--prompt-cache: --save-state FILE keeps a session, --load-state FILE goes on with it
--prompt-cache-all: --save-state FILE keeps a session, --load-state FILE goes on with it
--prompt-cache-ro: --load-state FILE goes on with a session and does not write it
-o --output --output-file: the text goes to stdout; redirect it in the shell
--in-prefix: --chat puts messages into the model's template
--in-suffix: --chat puts messages into the model's template
--in-prefix-bos: --chat puts messages into the model's template
--jinja --no-jinja: --chat always uses a Jinja template, of the model or of --chat-template; leave it out
--chat-template
--chat-template-file
--chat-template-kwargs
--skip-chat-parsing --no-skip-chat-parsing: answers are never parsed; leave it out
--reasoning-format: answers are written as they are, with the thoughts of a model; leave it out
--reasoning-preserve --no-reasoning-preserve: the template of the model decides
-rea --reasoning: give it to the template, as --chat-template-kwargs '{{"enable_thinking": false}}'
--reasoning-effort: give it to the template, as --chat-template-kwargs '{{"reasoning_effort": "low"}}'
--reasoning-budget: -n limits the new tokens
--reasoning-budget-message: -n limits the new tokens
--samplers: the order is fixed: penalties, top-k, top-p, min-p, temperature
--sampler-seq --sampling-seq: the order is fixed: penalties, top-k, top-p, min-p, temperature
-bs --backend-sampling: GPUs choose tokens by themselves where they can; leave it out
--top-nsigma --top-n-sigma: {NO_SAMPLER_REMEDY}
--xtc-probability: {NO_SAMPLER_REMEDY}
--xtc-threshold: {NO_SAMPLER_REMEDY}
--typical --typical-p: {NO_SAMPLER_REMEDY}
--dry-multiplier: {NO_SAMPLER_REMEDY}
--dry-base: {NO_SAMPLER_REMEDY}
--dry-allowed-length: {NO_SAMPLER_REMEDY}
--dry-penalty-last-n: {NO_SAMPLER_REMEDY}
--dry-sequence-breaker: {NO_SAMPLER_REMEDY}
--adaptive-target: {NO_SAMPLER_REMEDY}
--adaptive-decay: {NO_SAMPLER_REMEDY}
--dynatemp-range: {NO_SAMPLER_REMEDY}
--dynatemp-exp: {NO_SAMPLER_REMEDY}
--mirostat: {NO_SAMPLER_REMEDY}
--mirostat-lr: {NO_SAMPLER_REMEDY}
--mirostat-ent: {NO_SAMPLER_REMEDY}
--server-base: hocket run loads the model itself
-ctxcp --ctx-checkpoints --swa-checkpoints: --save-state FILE keeps a session
-cram --cache-ram: --save-state FILE keeps a session
--log-prompts-dir: {REDIRECT_REMEDY}
-mm --mmproj: {TEXT_ONLY_REMEDY}
-mmu --mmproj-url: {TEXT_ONLY_REMEDY}
--mmproj-auto --no-mmproj --no-mmproj-auto: {TEXT_ONLY_REMEDY}
--mmproj-offload --no-mmproj-offload: {TEXT_ONLY_REMEDY}
-mmdev --mmproj-device: {TEXT_ONLY_REMEDY}
--image: {TEXT_ONLY_REMEDY}
--audio: {TEXT_ONLY_REMEDY}
--video: {TEXT_ONLY_REMEDY}
--image-min-tokens: {TEXT_ONLY_REMEDY}
--image-max-tokens: {TEXT_ONLY_REMEDY}
-hfd -hfrd --hf-repo-draft --spec-draft-hf: hocket downloads nothing; give the path of a draft model with -md
-hfv -hfrv --hf-repo-v: {TEXT_ONLY_REMEDY}
-hffv --hf-file-v: {TEXT_ONLY_REMEDY}
-td --threads-draft --spec-draft-threads: {DRAFT_DEVICE_REMEDY}
-tbd --threads-batch-draft --spec-draft-threads-batch: {DRAFT_DEVICE_REMEDY}
-Cd --cpu-mask-draft --spec-draft-cpu-mask: {SYSTEM_TOOL_REMEDY}
-Crd --cpu-range-draft --spec-draft-cpu-range: {SYSTEM_TOOL_REMEDY}
-Cbd --cpu-mask-batch-draft --spec-draft-cpu-mask-batch: {SYSTEM_TOOL_REMEDY}
--cpu-strict-draft --spec-draft-cpu-strict: {SYSTEM_TOOL_REMEDY}
--cpu-strict-batch-draft --spec-draft-cpu-strict-batch: {SYSTEM_TOOL_REMEDY}
--prio-draft --spec-draft-prio: {SYSTEM_TOOL_REMEDY}
--prio-batch-draft --spec-draft-prio-batch: {SYSTEM_TOOL_REMEDY}
--poll-draft --spec-draft-poll: {SYSTEM_TOOL_REMEDY}
--poll-batch-draft --spec-draft-poll-batch: {SYSTEM_TOOL_REMEDY}
-otd --override-tensor-draft --spec-draft-override-tensor: {DRAFT_DEVICE_REMEDY}
-cmoed --cpu-moe-draft --spec-draft-cpu-moe: {DRAFT_DEVICE_REMEDY}
-ncmoed --n-cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe: {DRAFT_DEVICE_REMEDY}
-devd --device-draft --spec-draft-device: {DRAFT_DEVICE_REMEDY}
-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl: {DRAFT_DEVICE_REMEDY}
--spec-draft-backend-sampling --no-spec-draft-backend-sampling: {DRAFT_DEVICE_REMEDY}
--draft-min --draft-n-min --spec-draft-n-min: --draft-max sets the number of tokens that are guessed
--draft-p-min --spec-draft-p-min: --draft-max sets the number of tokens that are guessed
--draft-p-split --spec-draft-p-split: --draft-max sets the number of tokens that are guessed
--spec-type: -md names a draft model, --draft-max alone uses the model's own MTP blocks
--spec-draft-sampling: the draft model takes its most probable tokens; leave it out
--spec-synth-len: {NO_SYNTHETIC_DRAFT_REMEDY}
--spec-synth-rates: {NO_SYNTHETIC_DRAFT_REMEDY}
--spec-default: -md names a draft model, --draft-max alone uses the model's own MTP blocks
--spec-ngram-mod-n-min: {NO_NGRAM_REMEDY}
--spec-ngram-mod-n-max: {NO_NGRAM_REMEDY}
--spec-ngram-mod-n-match: {NO_NGRAM_REMEDY}
--spec-ngram-simple-size-n: {NO_NGRAM_REMEDY}
--spec-ngram-simple-size-m: {NO_NGRAM_REMEDY}
--spec-ngram-simple-min-hits: {NO_NGRAM_REMEDY}
--spec-ngram-map-k-size-n: {NO_NGRAM_REMEDY}
--spec-ngram-map-k-size-m: {NO_NGRAM_REMEDY}
--spec-ngram-map-k-min-hits: {NO_NGRAM_REMEDY}
--spec-ngram-map-k4v-size-n: {NO_NGRAM_REMEDY}
--spec-ngram-map-k4v-size-m: {NO_NGRAM_REMEDY}
--spec-ngram-map-k4v-min-hits: {NO_NGRAM_REMEDY}
--gpt-oss-20b-default: {NO_DOWNLOAD_REMEDY}
--gpt-oss-120b-default: {NO_DOWNLOAD_REMEDY}
--vision-gemma-4b-default: {NO_DOWNLOAD_REMEDY}
--vision-gemma-12b-default: {NO_DOWNLOAD_REMEDY}
"""

BENCH_FLAGS = """
-p --n-prompt
-n --n-gen
-d --n-depth
-r --repetitions
-o --output
-pg: give both with -np 1 -p 64 -n 16; its last column is of prompt and new tokens together
--delay: tests follow each other at once; leave it out
-oe --output-err: -o prints to stdout; redirect it in the shell
--progress: kernels that are compiled are shown on a terminal; leave it out
--n-gen-warmup: one untimed run comes before the timed ones; leave it out
-embd --embeddings: the command is hocket embed; it is not timed
"""

PERPLEXITY_FLAGS = f"""
-p --prompt: give the text as a file, - for stdin
-s --seed: nothing is random; leave it out
--chunks: cut the text, as head -c 100000 FILE | hocket perplexity MODEL -
--ppl-stride: chunks do not overlap; leave it out
--ppl-output-type: --json prints one object
--hellaswag: hocket measures perplexity only; score answers by the logits of hocket logits
--hellaswag-tasks: hocket measures perplexity only; score answers by the logits of hocket logits
--winogrande: hocket measures perplexity only; score answers by the logits of hocket logits
--winogrande-tasks: hocket measures perplexity only; score answers by the logits of hocket logits
--multiple-choice: hocket measures perplexity only; score answers by the logits of hocket logits
--multiple-choice-tasks: hocket measures perplexity only; score answers by the logits of hocket logits
--kl-divergence: use hocket compare A.gguf B.gguf -f FILE
--kl-divergence-base --save-all-logits --all-logits: hocket logits writes the logits of every position
-kvu --kv-unified -no-kvu --no-kv-unified: chunks are measured one after the other; leave it out
--context-shift --no-context-shift: a chunk fills the context, and the next begins anew; leave it out
-n --predict --n-predict: {NO_SAMPLING_REMEDY}
--ignore-eos: {NO_SAMPLING_REMEDY}
--temp --temperature: {NO_SAMPLING_REMEDY}
--top-k: {NO_SAMPLING_REMEDY}
--top-p: {NO_SAMPLING_REMEDY}
--min-p: {NO_SAMPLING_REMEDY}
--repeat-last-n: {NO_SAMPLING_REMEDY}
--repeat-penalty: {NO_SAMPLING_REMEDY}
--presence-penalty: {NO_SAMPLING_REMEDY}
--frequency-penalty: {NO_SAMPLING_REMEDY}
-l --logit-bias: {NO_SAMPLING_REMEDY}
--grammar: {NO_SAMPLING_REMEDY}
--grammar-file: {NO_SAMPLING_REMEDY}
-j --json-schema: {NO_SAMPLING_REMEDY}
"""

FLAGS: tuple[LlamaCppFlag, ...] = (
    *(
        LlamaCppFlag(row.flags, row.llama_cpp)
        for config in (RunConfig, Sampling)
        for row in list_options(config).values()
        if row.llama_cpp
    ),
    *_parse_flags_and_remedies("cbp", COMMON_FLAGS),
    *_parse_flags_and_remedies("cp", MODEL_FLAGS),
    *_parse_flags_and_remedies("c", CLI_FLAGS),
    *_parse_flags_and_remedies("b", BENCH_FLAGS),
    *_parse_flags_and_remedies("p", PERPLEXITY_FLAGS),
)

PROGRAM_REMEDIES = {
    "llama-cli": "use hocket run --chat",
    "llama-completion": "use hocket run",
    "llama-simple": "use hocket run",
    "llama-bench": "use hocket bench",
    "llama-batched-bench": "use hocket bench -np 1,2,4",
    "llama-perplexity": "use hocket perplexity",
    "llama-tokenize": "use hocket tokenize",
    "llama-embedding": "use hocket embed",
    "llama-fit-params": "use hocket plan",
    "llama-speculative": "use hocket run -md DRAFT",
    "test-backend-ops": "use hocket check",
    "llama-server": "use hocket serve; -c is the context of each slot there",
    "llama-quantize": "use hocket quantize",
    "llama-imatrix": "use hocket imatrix",
    "llama-gguf-split": "hocket reads split files; llama-gguf-split writes them",
    "llama-export-lora": "hocket run --lora FILE applies an adapter; llama-export-lora writes a model",
    "convert_hf_to_gguf": "use hocket convert FOLDER OUT.gguf; all commands that run a model take such folders, too",
}
"""The remedy for each program of llama.cpp."""
PROGRAM_SYNONYMS = {
    "server": "llama-server",
    "chat": "llama-cli",
    "main": "llama-cli",
    "generate": "llama-completion",
    "convert": "convert_hf_to_gguf",
}
"""Programs of llama.cpp by command name in other software."""


def find_unsupported_flag(name: str, command: str) -> LlamaCppFlag | None:
    """Find the description of a flag that llama.cpp has and hocket lacks; return `None` for other names.

    Several programs of llama.cpp may have the flag. The program that corresponds to the hocket command `command` is
    searched first.
    """
    found = [flag for flag in FLAGS if flag.remedy and name in flag.names]
    program = next((program for program, like in COMMAND_OF_PROGRAM.items() if like == command), "")
    return next((flag for flag in found if program in flag.programs), None) or next(iter(found), None)


def find_llama_cpp_program_replacement(word: str) -> str | None:
    """Find the hocket command, as a hint, that replaces a program of llama.cpp; None for an unknown program.

    The word may leave out ``llama-`` and ``.py``.
    """
    name = PROGRAM_SYNONYMS.get(word, word).removesuffix(".py")
    return PROGRAM_REMEDIES.get(name) or PROGRAM_REMEDIES.get(f"llama-{name}")
