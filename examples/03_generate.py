"""Run the built-in language model on one device and on two: text, embeddings and scores."""

import numpy as np

import hocket

texts = []
for devices in ("cpu:0", "cpu:0,cpu:1"):
    with hocket.Model(devices=devices, split_mode="tensor", exact=True) as model:  # or the path of a GGUF file
        fragments = model.generate("It is a truth universally acknowledged, that", max_tokens=32, temperature=0)
        texts.append("".join(fragments))
        ball, dance, rent = model.embed(["a ball", "a dance", "four thousand a year"])
        print(f"{model!r}\n  {texts[-1]!r}")
        print(f"  a ball is to a dance {ball @ dance:.2f}, to four thousand a year {ball @ rent:.2f}")
        print(f"  perplexity of that text {np.exp(-model.score(texts[-1]).mean()):.1f}; bytes {model.memory}")

# Activations are not quantised to 8 bits, so another order of sums changes no token.
assert texts[0] == texts[1]
