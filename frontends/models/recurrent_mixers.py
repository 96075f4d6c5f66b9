"""The recurrent token mixers by the name that the traits of a family have."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from ..gguf.hyperparameter_keys import ArchitectureMetadata
from .hyperparameters import TokenMixer
from .inputs.family import FamilyTraits
from .layers.gated_delta_net import GatedDeltaNet, KimiDeltaAttention
from .layers.lightning_attention import GatedShortConvolution, LightningAttention
from .layers.mamba import Mamba, Mamba2, Plamo2Mamba
from .layers.rwkv import Rwkv6TimeMix, Rwkv7TimeMix


class RecurrentMixer(Protocol):
    """A class of token mixers with recurrent state, such as `Mamba`.

    `from_keys` reads the hyperparameters of the mixer of a layer from the metadata.
    """

    @classmethod
    def from_keys(cls, keys: ArchitectureMetadata, family: FamilyTraits, layer: int) -> TokenMixer: ...


RECURRENT_MIXERS: Mapping[str, type[RecurrentMixer]] = MappingProxyType(
    {
        **{"convolution": GatedShortConvolution, "delta": GatedDeltaNet, "kimi": KimiDeltaAttention},
        **{"lightning": LightningAttention, "mamba": Mamba, "mamba2": Mamba2, "plamo2": Plamo2Mamba},
        **{"rwkv6": Rwkv6TimeMix, "rwkv7": Rwkv7TimeMix},
    }
)
