"""Use a language model: generate text, score a text, compare texts, and chat if the model has a chat template."""

import sys

import hocket

with hocket.Model(context=256) as model:  # without a path: the small built-in model
    text = "".join(model.generate("It is a truth", max_tokens=24, seed=1))
    print("It is a truth" + text)
    for token in model.tokens("She was", max_tokens=4, temperature=0):
        print(f"{token.id:6} {token.text!r} {token.logprob:.2f}")
    ball, dance, post = model.embed(["a ball", "a dance", "a letter from London"])
    print(f"a ball is {ball @ dance:.2f} like a dance, {ball @ post:.2f} like a letter")
    print("log-probability of each token:", model.score("It is a truth universally acknowledged").round(1))

if sys.argv[1:]:  # the path of a model with a chat template
    with hocket.Model(sys.argv[1]) as model:
        for fragment in model.chat("Who are you?", max_tokens=32):
            print(fragment, end="", flush=True)
