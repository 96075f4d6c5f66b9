"""Backends, which run programs on devices of one kind; found through the entry-point group ``hocket.backends``."""

from .base import Backend as Backend
from .base import Device as Device
from .base import find as find
from .base import registered as registered
