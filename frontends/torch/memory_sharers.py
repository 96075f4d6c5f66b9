"""Parameters that share memory, though PyTorch counts their changes apart.

After ``b.data = a.data`` a change of `a` in place changes the numbers of `b`, but not the version of `b`. A copy of `b`
must be refreshed when the version of either of them changes.
"""

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary


class MemorySharers:
    """The parameters that have been added, by the storage that they read. Parameters are referenced weakly.

    `change_count` changes whenever parameters begin to share a storage.
    """

    def __init__(self) -> None:
        self.change_count = 0
        self._address_by_parameter = WeakTensorKeyDictionary()
        self._references_by_address: dict[int, list[WeakIdRef]] = {}

    def add_or_update_parameter_storage(self, parameter: torch.Tensor) -> None:
        """Add a parameter, or add it again after it has got another storage."""
        address = parameter.untyped_storage().data_ptr()
        old = self._address_by_parameter.get(parameter)
        if old == address:
            return
        if old is not None:
            for reference in [r for r in self._references_by_address.get(old, ()) if r() is parameter]:
                self._remove_reference(old, reference)
        self._address_by_parameter[parameter] = address
        references = self._references_by_address.setdefault(address, [])
        references.append(WeakIdRef(parameter, lambda reference: self._remove_reference(address, reference)))
        self.change_count += len(references) > 1

    def _remove_reference(self, address: int, reference: WeakIdRef) -> None:
        references = self._references_by_address.get(address, [])
        references[:] = [r for r in references if r is not reference]
        if not references:
            self._references_by_address.pop(address, None)

    def find_sharers(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """Return the other live parameters with entries in the bytes of a parameter."""
        references = self._references_by_address.get(parameter.untyped_storage().data_ptr(), ())
        if len(references) < 2:
            return []
        first, end = _find_byte_range(parameter)
        others = [known() for known in list(references)]
        ranges = [(other, *_find_byte_range(other)) for other in others if other is not None and other is not parameter]
        return [other for other, start, stop in ranges if start < end and first < stop]


def _find_byte_range(parameter: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a parameter and of the byte after its last one."""
    span = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    start = parameter.data_ptr()
    return start, start + (span + 1) * parameter.element_size() if parameter.numel() else start
