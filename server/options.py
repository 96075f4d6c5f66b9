"""The options of the HTTP server: its addresses, the access of clients, and limits of sizes, times and counts."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import field

from ..frontends.errors import ModelError
from ..frontends.generation.sampling import DEFAULT_TEMPERATURE, Sampling
from ..graph.lazy_dataclass import dataclass

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
"""Host names of this machine, which the check of the Host header permits."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Addresses, access, limits and defaults of a server. Names of options end with their unit.

    - `host`: the address, or several with commas between them.
    - `api_keys`: clients need one of them; without keys, every client that reaches the address is served.
    - `insecure`: permit an address other than loopback without a key.
    - `cors_origins`: origins of web pages that may call the server; ``localhost`` for every port of the machine, or
      ``*``.
    - `model_file`: the name of the model file, for ``/props``.
    - `aliases`: further names of the model. `strict_model`: refuse requests that name another model.
    - `sampling`: defaults of the sampling options; `seed`: the default seed, -1 for a random one.
    - `default_max_tokens`: limit of new tokens for requests without a limit.
    - `chat_template`: a template that replaces the template of the model. `template_variables`: variables of the
      template, such as ``enable_thinking``, for requests that do not set them.
    - `grammar_seconds`: time limit for the compilation of a grammar or a JSON schema.
    - `queue_seconds`: longest wait for a slot; `request_seconds`: longest duration of a request; `stall_seconds`:
      longest time in which a client reads nothing; `drain_seconds`: time for running requests after SIGTERM.
    - `heartbeat_seconds`: a silence of the engine after which ``/health`` reports a failure.
    - `ping_seconds`: silence after which a stream sends a comment to stay open.
    - `slot_save_path`: the folder of slot files; empty switches the actions of ``/slots`` off.
    - `shows_prompts`: add the rendered prompt to chat answers, as ``verbose`` in the request does.

    Raises:
        ModelError: The address is reachable from other machines and there is no key.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    insecure: bool = False
    cors_origins: tuple[str, ...] = ()
    model_file: str = ""
    aliases: tuple[str, ...] = ()
    strict_model: bool = False
    sampling: Sampling = Sampling(temperature=DEFAULT_TEMPERATURE)
    seed: int = -1
    default_max_tokens: int = 4096
    chat_template: str | None = None
    template_variables: Mapping[str, object] = field(default_factory=dict)
    max_body_bytes: int = 16 << 20
    max_header_bytes: int = 16 << 10
    max_connections: int = 1024
    keep_alive_seconds: float = 75.0
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    grammar_seconds: float = 2.0
    queue_seconds: float = 60.0
    request_seconds: float = 3600.0
    stall_seconds: float = 60.0
    drain_seconds: float = 30.0
    heartbeat_seconds: float = 30.0
    ping_seconds: float = 15.0
    has_metrics: bool = True
    has_slots: bool = True
    slot_save_path: str = ""
    shows_prompts: bool = False
    tls_certificate: str | None = None
    tls_key: str | None = None

    def __post_init__(self) -> None:
        if not (self.api_keys or self.insecure or self.is_loopback_only):
            raise ModelError(f"--host {self.host!a} is reachable from other machines; give an API key, or --insecure")
        if any(not key for key in self.api_keys):
            raise ModelError("an API key is empty; remove it")

    @property
    def is_loopback_only(self) -> bool:
        """Whether all addresses are loopback addresses, which only programs of this machine can reach."""
        return all(map(_is_loopback, self.hosts))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The addresses in `host`, without brackets."""
        return tuple(host.strip().strip("[]") for host in self.host.split(","))


def _is_loopback(host: str) -> bool:
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
