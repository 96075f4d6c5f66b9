"""The token counts and seconds of a generation."""

from __future__ import annotations

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
        def rate(tokens: int, seconds: float) -> str:
            count = f"{tokens} token{'s' * (tokens != 1)}"
            return f"{count} {tokens / seconds:.1f} tok/s" if seconds and tokens else f"{count} -"

        load = f"load {self.load:.1f} s, " if self.load else ""
        return (
            f"{load}prefill {rate(self.prompt_tokens, self.prefill)}, decode {rate(self.new_tokens, self.decode)}, "
            f"plans and kernels {self.planning:.1f} s{self.token_path and f', {self.token_path}'}"
        )
