"""Launches that are kept to be put in order, of kernels with mistakes in them."""

from __future__ import annotations

from dataclasses import replace

from hocket.backends.cupy.emulation.access_log import AccessLogDriver

from .emulation import EditedSource


class EditedDriver(AccessLogDriver):
    """A driver that launches the result of `edit` for the recorded launches, without a dropped barrier."""

    def __init__(self, edit, dropped=("", 0)):
        super().__init__(dropped)
        self.edit = edit

    def record(self, steps, on):
        return super().record(self.edit(steps), on)


def edit_kernels(file, good, bad):
    """Kernels that see a file, with `bad` in it where `good` is, once."""

    def replace_kernel(launch):
        source = launch.kernel.source
        if file not in source.files:
            return launch
        assert source.text.count(good) == 1, good
        body = source.text.replace(good, bad)
        source_with_fault = EditedSource(
            source.file, (launch.kernel.name,), instructions=source.instructions, body=body
        )
        return replace(launch, kernel=source_with_fault[launch.kernel.name])

    return lambda steps: [replace_kernel(step) for step in steps]
