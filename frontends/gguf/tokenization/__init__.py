"""Tokenizers of GGUF files: vocabularies, rules that split text, and the algorithm of each kind."""
