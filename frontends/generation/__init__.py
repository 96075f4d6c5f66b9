"""From logits to text: sampling, grammars, speculative decoding and conversations."""
