"""The token counts and seconds of a generation."""

from __future__ import annotations

from ...graph.errors import format_count
from ...graph.lazy_dataclass import dataclass


@dataclass(slots=True)
class GenerationTiming:
    """Token counts and seconds of a generation, updated during the run.

    - `prefill`, `decode`: seconds of the steps, without the time for plans and kernels.
    - `planning`: seconds for plans and kernels.
    - `load`: seconds for reading and packing weights.
    - `token_path`: how a device with its own memory has chosen the tokens of the last text; otherwise empty.
    """

    prompt_tokens: int = 0
    prefill: float = 0.0
    new_tokens: int = 0
    decode: float = 0.0
    planning: float = 0.0
    load: float = 0.0
    token_path: str = ""

    def __add__(self, other: GenerationTiming) -> GenerationTiming:
        return GenerationTiming(
            self.prompt_tokens + other.prompt_tokens,
            self.prefill + other.prefill,
            self.new_tokens + other.new_tokens,
            self.decode + other.decode,
            self.planning + other.planning,
            self.load + other.load,
            other.token_path or self.token_path,
        )

    def __str__(self) -> str:
        """Describe the parts that took time: ``prefill 5 tokens 50.0 tok/s, plans and kernels 0.0 s``."""
        phases = (("prefill", self.prompt_tokens, self.prefill), ("decode", self.new_tokens, self.decode))
        parts = [f"load {self.load:.1f} s"] if self.load else []
        parts += [
            f"{phase} {format_count(tokens, 'token')} {tokens / seconds:.1f} tok/s"
            for phase, tokens, seconds in phases
            if tokens and seconds
        ]
        return ", ".join([*parts, f"plans and kernels {self.planning:.1f} s", *filter(None, [self.token_path])])
