"""The cells of a KV cache that a token attends to, and the temperature of its queries."""

from __future__ import annotations

from ....graph.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """Which earlier tokens a token attends to: all of them and itself, or only the last ``window`` ones.

    A ``window`` of 0 means all.

    - ``is_chunked`` divides positions into chunks of ``window``; a token attends only to its own chunk.
    - ``has_distance_bias`` adds distances to the mask, for ALiBi.
    - Without ``is_causal`` a token also attends to later tokens: to all of them, or with ``is_centred`` to half of
      ``window`` on either side.
    """

    window: int = 0
    is_chunked: bool = False
    has_distance_bias: bool = False
    is_causal: bool = True
    is_centred: bool = False

    @property
    def cell_lifetime_tokens(self) -> int:
        """Number of tokens after which the key and value of a token are never read again; 0 without such a number.

        A ring cache overwrites them then.
        """
        return self.window if self.is_causal and not self.is_chunked and not self.has_distance_bias else 0


FULL_WINDOW = AttentionWindow()
TemperatureScaling = tuple[int, float, float] | None
"""Floor, factor and offset for `StepGraphBuilder.scale_queries_by_temperature`; `None` for a temperature of 1."""
