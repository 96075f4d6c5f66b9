"""Backends, which run programs on devices of one kind; found through the entry-point group ``hocket.backends``."""

from .base import Backend as Backend
from .base import Device as Device
from .base import find_device as find_device
from .base import find_registered_backends as find_registered_backends
