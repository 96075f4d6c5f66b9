"""Run the language model that comes with hocket: tokens in, text out, on one device and on two."""

from hocket.frontends.generate import Timing, generate, stream_text
from hocket.frontends.gguf.tokenizer import tokenizer_from_metadata
from hocket.frontends.open import open_model
from hocket.frontends.sampling import Sampling
from hocket.frontends.session import Group, Session

model = open_model(None)  # or the path of a GGUF file
tokenizer = tokenizer_from_metadata(model.gguf.metadata)
prompt = tokenizer.encode("It is a truth universally acknowledged, that")

texts = []
for group in (Group(exact=True), Group(("cpu:0", "cpu:1"), split_mode="tensor", exact=True)):
    session, timing = Session(model, on=group), Timing()
    tokens = generate(session, prompt, limit=32, sampling=Sampling(), stop=tokenizer.eos_ids, timing=timing)
    texts.append("".join(stream_text(tokens, tokenizer)))
    print(f"{', '.join(group.devices)}: {texts[-1]!r}\n  {timing}")

# Nothing is rounded to 8 bits, so sums in another order change no token.
assert texts[0] == texts[1]
