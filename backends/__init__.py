"""Backends, which run programs on devices of one kind; found through the entry-point group ``hocket.backends``."""

from .base import Backend as Backend
from .base import Device as Device
from .base import find_backends_by_device_kind as find_backends_by_device_kind
from .base import find_device as find_device
