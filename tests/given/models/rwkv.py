"""RWKV 6 and 7, and the models made from Qwen with their layers, as tiny files with float64 references.

The references follow the recurrences of two papers token by token:

1. Peng et al., Eagle and Finch: RWKV with matrix-valued states and dynamic recurrence, 2024.
2. Peng et al., RWKV-7 Goose with expressive dynamic state evolution, 2025.

Transformers has neither, and llama.cpp's test of architectures leaves them out. Names of tensors come from the
``gguf`` package.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter, TokenType

F64 = npt.NDArray[np.float64]
TOKENS = [5, 17, 3, 40, 9, 22, 31, 1, 9]
KINDS = ("rwkv6", "rwkv7", "rwkv6qwen2", "arwkv7")
WIDTH, SIZE, LAYERS, WORDS, INNER, RANK, EPS = 64, 16, 3, 48, 80, 4, 1e-5
HEADS, SHARED = WIDTH // SIZE, 2
"""Heads, and key and value heads where heads share them."""
RESCALE = 2


def from_qwen(kind: str) -> bool:
    return kind in ("rwkv6qwen2", "arwkv7")


def shapes(kind: str, *, fused: bool = True, gate: bool = True) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of a file: the rows of a matrix are its outputs.

    RWKV 6 may have separate shares instead of ``fused``. Models made from Qwen by RWKV 7 may have no gate.
    """
    from_qwen_model, seven = from_qwen(kind), kind.endswith("7")
    yield "token_embd.weight", (WORDS, WIDTH)
    yield "output.weight", (WORDS, WIDTH)
    norms = ["output_norm"] if from_qwen_model else ["output_norm", "token_embd_norm"]
    for i in range(LAYERS):
        norms += [f"blk.{i}.attn_norm", f"blk.{i}.{'ffn_norm' if from_qwen_model else 'attn_norm_2'}"]
        mix = f"blk.{i}.time_mix_"
        few = SHARED * SIZE if kind == "rwkv6qwen2" else WIDTH
        yield mix + "receptance.weight", (WIDTH, WIDTH)
        yield mix + "key.weight", (few, WIDTH)
        yield mix + "value.weight", (few, WIDTH)
        yield mix + "output.weight", (WIDTH, WIDTH)
        if not from_qwen_model:
            yield mix + "ln.weight", (WIDTH,)
            yield mix + "ln.bias", (WIDTH,)
        if seven:
            kinds = "wavg" if gate else "wav"
            yield mix + "lerp_fused.weight", (6 if gate else 5, 1, 1, WIDTH)
            for k in kinds:
                yield f"{mix}{k}1.weight", (RANK, WIDTH)
                yield f"{mix}{k}2.weight", (WIDTH, RANK)
            for k in ("w0", "a0", "v0", "k_k", "k_a", "r_k"):
                yield f"{mix}{k}.weight", (WIDTH,)
        else:
            yield mix + "gate.weight", (WIDTH, WIDTH)
            yield mix + "w1.weight", (5 * RANK, WIDTH)
            yield mix + "w2.weight", (5, WIDTH, RANK)
            yield mix + "lerp_x.weight", (1, 1, WIDTH)
            if fused:
                yield mix + "lerp_fused.weight", (5, 1, 1, WIDTH)
            else:
                yield from ((f"{mix}lerp_{k}.weight", (1, 1, WIDTH)) for k in "wkvrg")
            yield mix + "decay.weight", (WIDTH,)
            yield mix + "decay_w1.weight", (RANK, WIDTH)
            yield mix + "decay_w2.weight", (WIDTH, RANK)
            if from_qwen_model:
                yield from ((f"{mix}{k}.bias", (n,)) for k, n in (("receptance", WIDTH), ("key", few), ("value", few)))
            else:
                yield mix + "first.weight", (HEADS, SIZE)
        if from_qwen_model:
            yield from ((f"blk.{i}.ffn_{k}.weight", (INNER, WIDTH)) for k in ("gate", "up"))
            yield f"blk.{i}.ffn_down.weight", (WIDTH, INNER)
        else:
            yield f"blk.{i}.channel_mix_lerp_k.weight", (1, 1, WIDTH)
            yield f"blk.{i}.channel_mix_key.weight", (INNER, WIDTH)
            yield f"blk.{i}.channel_mix_value.weight", (WIDTH, INNER)
            if not seven:
                yield f"blk.{i}.channel_mix_lerp_r.weight", (1, 1, WIDTH)
                yield f"blk.{i}.channel_mix_receptance.weight", (WIDTH, WIDTH)
    for norm in norms:
        yield f"{norm}.weight", (WIDTH,)
        if not from_qwen_model:
            yield f"{norm}.bias", (WIDTH,)


def tensors(kind: str, **form: bool) -> dict[str, npt.NDArray[np.float32]]:
    """Weights by chance, in which every part matters."""
    rng, arrays = np.random.default_rng(7), {}
    for name, shape in shapes(kind, **form):
        x = rng.standard_normal(shape)
        last = name.split(".")[-2]
        if "norm" in name or last == "time_mix_ln":
            x = (1.0 if name.endswith("weight") else 0.0) + 0.2 * x
        elif "lerp" in last:
            x = 0.5 + 0.3 * x
        elif last in ("time_mix_k_k", "time_mix_k_a"):
            x = 1.0 + 0.2 * x
        elif len(shape) > 1 and last not in ("token_embd", "time_mix_first"):
            x = x / np.sqrt(shape[-1])
        arrays[name] = x.astype(np.float32)
    return arrays


VOCABULARY = ["<s>", "a", "b", "ab", "abc", " ", "\\n", "\\t", "\\r", "\\\\", "\\'", '"', "\\xe4", "\\xbd", "\\xa0"]
VOCABULARY += ["\\xe4\\xbd\\xa0", "\\n\\n", "c", "bcd", "\\x00", "User", " the", "\\xff"]
"""Tokens as files of RWKV have them: bytes in Python's spelling."""


def write_rwkv_model(kind: str, path: Path, **form: bool) -> Path:
    """A model as a file; one that was made from Qwen has no vocabulary here."""
    writer = GGUFWriter(path, kind)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_wkv_head_size(SIZE)
    writer.add_head_count(0)
    if kind == "rwkv6":
        writer.add_rescale_every_n_layers(RESCALE)
    if from_qwen(kind):
        writer.add_layer_norm_rms_eps(EPS)
        writer.add_token_shift_count(1)
    else:
        writer.add_layer_norm_eps(EPS)
        writer.add_tokenizer_model("rwkv")
        padding = [f"[PAD{i}]" for i in range(len(VOCABULARY), WORDS)]
        writer.add_token_list([*VOCABULARY, *padding])
        types = [TokenType.CONTROL, *[TokenType.NORMAL] * (len(VOCABULARY) - 1), *[TokenType.UNUSED] * len(padding)]
        writer.add_token_types(types)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
        writer.add_eot_token_id(VOCABULARY.index("\\n\\n"))
    for name, array in tensors(kind, **form).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --------------------------------------------------------------------------------------------------------- references


def sigmoid(x: F64) -> F64:
    return 1.0 / (1.0 + np.exp(-x))


class Reference:
    """A model read token by token."""

    def __init__(self, kind: str, **form: bool) -> None:
        self.kind = kind
        self.w = {name: array.astype(np.float64) for name, array in tensors(kind, **form).items()}
        self.states = [np.zeros((HEADS, SIZE, SIZE)) for _ in range(LAYERS)]
        """Of each head S[key, value]."""
        self.before = [[np.zeros(WIDTH), np.zeros(WIDTH)] for _ in range(LAYERS)]
        """The inputs of time mix and channel mix at the previous token."""

    def norm(self, name: str, x: F64) -> F64:
        if from_qwen(self.kind):
            return x / np.sqrt((x * x).mean() + EPS) * self.w[f"{name}.weight"]
        return (x - x.mean()) / np.sqrt(x.var() + EPS) * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def __call__(self, token: int) -> F64:
        """The logits behind a token."""
        x = self.w["token_embd.weight"][token]
        if not from_qwen(self.kind):
            x = self.norm("token_embd_norm", x)
        first: list[F64] = []
        for i in range(LAYERS):
            h = self.norm(f"blk.{i}.attn_norm", x)
            mix = self.seven if self.kind.endswith("7") else self.six
            x = x + mix(i, h, self.before[i][0], first)
            self.before[i][0] = h
            h = self.norm(f"blk.{i}.{'ffn_norm' if from_qwen(self.kind) else 'attn_norm_2'}", x)
            x = x + self.feed_forward(i, h, self.before[i][1])
            self.before[i][1] = h
            if self.kind == "rwkv6" and (i + 1) % RESCALE == 0:
                x = x / 2.0
        return self.w["output.weight"] @ self.norm("output_norm", x)

    def feed_forward(self, i: int, x: F64, before: F64) -> F64:
        w = {name.removeprefix(f"blk.{i}."): array for name, array in self.w.items()}
        if from_qwen(self.kind):
            gate = w["ffn_gate.weight"] @ x
            return w["ffn_down.weight"] @ (gate * sigmoid(gate) * (w["ffn_up.weight"] @ x))
        k = w["channel_mix_key.weight"] @ (x + (before - x) * w["channel_mix_lerp_k.weight"].ravel())
        y = w["channel_mix_value.weight"] @ np.maximum(k, 0.0) ** 2
        if self.kind == "rwkv7":
            return y
        r = w["channel_mix_receptance.weight"] @ (x + (before - x) * w["channel_mix_lerp_r.weight"].ravel())
        return sigmoid(r) * y

    def heads_normed(self, w: dict[str, F64], y: F64) -> F64:
        """The norm of each head on its own, which models made from Qwen leave out."""
        if from_qwen(self.kind):
            return y.ravel()
        y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 64e-5)
        return y.ravel() * w["ln.weight"] + w["ln.bias"]

    def six(self, i: int, x: F64, before: F64, first: list[F64]) -> F64:
        w = {name.removeprefix(f"blk.{i}.time_mix_"): array for name, array in self.w.items()}
        change = before - x
        low = np.tanh(w["w1.weight"] @ (x + change * w["lerp_x.weight"].ravel())).reshape(5, RANK)
        seen = {}
        for number, kind in enumerate("wkvrg"):
            fused = w.get("lerp_fused.weight")
            share = w[f"lerp_{kind}.weight"].ravel() if fused is None else fused[number].ravel()
            seen[kind] = x + change * (share + w["w2.weight"][number] @ low[number])
        d = w["decay.weight"] + w["decay_w2.weight"] @ np.tanh(w["decay_w1.weight"] @ seen["w"])
        decay = np.exp(-np.exp(d)).reshape(HEADS, SIZE)
        nothing = np.zeros(())
        r, k, v = (
            (w[f"{name}.weight"] @ seen[kind] + w.get(f"{name}.bias", nothing)).reshape(-1, SIZE)
            for name, kind in (("receptance", "r"), ("key", "k"), ("value", "v"))
        )
        g = w["gate.weight"] @ seen["g"]
        y = np.zeros((HEADS, SIZE))
        for h in range(HEADS):
            key, value = (z[h * len(z) // HEADS] for z in (k, v))
            if from_qwen(self.kind):
                self.states[i][h] = decay[h][:, None] * self.states[i][h] + np.outer(key * (1.0 - decay[h]), value)
                y[h] = r[h] @ self.states[i][h] / np.sqrt(SIZE)
            else:
                y[h] = r[h] @ (self.states[i][h] + np.outer(w["first.weight"][h] * key, value))
                self.states[i][h] = decay[h][:, None] * self.states[i][h] + np.outer(key, value)
        gate = sigmoid(g) if from_qwen(self.kind) else g * sigmoid(g)
        return w["output.weight"] @ (self.heads_normed(w, y) * gate)

    def seven(self, i: int, x: F64, before: F64, first: list[F64]) -> F64:
        w = {name.removeprefix(f"blk.{i}.time_mix_"): array for name, array in self.w.items()}
        shares = w["lerp_fused.weight"].reshape(-1, WIDTH)
        r, d, k, v, a, *g = (x + (before - x) * share for share in shares)
        d = w["w0.weight"] + w["w2.weight"] @ np.tanh(w["w1.weight"] @ d)
        decay = np.exp(-np.exp(-0.5) * sigmoid(d)).reshape(HEADS, SIZE)
        shift = sigmoid(w["v0.weight"] + w["v2.weight"] @ (w["v1.weight"] @ v))
        v = w["value.weight"] @ v
        first.append(v)
        v = v + (first[0] - v) * shift
        rate = sigmoid(w["a0.weight"] + w["a2.weight"] @ (w["a1.weight"] @ a))
        r, k = w["receptance.weight"] @ r, w["key.weight"] @ k
        removed = (k * w["k_k.weight"]).reshape(HEADS, SIZE)
        removed /= np.linalg.norm(removed, axis=-1, keepdims=True)
        k = k * (1.0 + (rate - 1.0) * w["k_a.weight"])
        r, k, v, rate = (z.reshape(HEADS, SIZE) for z in (r, k, v, rate))
        y, bonus = np.zeros((HEADS, SIZE)), np.zeros((HEADS, SIZE))
        for h in range(HEADS):
            change = np.diag(decay[h]) - np.outer(removed[h], rate[h] * removed[h])
            # The paper writes S with values as rows; this is its transpose.
            self.states[i][h] = change.T @ self.states[i][h] + np.outer(k[h], v[h])
            y[h] = r[h] @ self.states[i][h]
            bonus[h] = (r[h] * k[h] * w["r_k.weight"].reshape(HEADS, SIZE)[h]).sum() * v[h]
        y = self.heads_normed(w, y) + bonus.ravel()
        if g:
            y = y * (w["g2.weight"] @ sigmoid(w["g1.weight"] @ g[0]))
        return w["output.weight"] @ y
