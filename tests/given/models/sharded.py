"""The error of tiny models of each architecture, sharded over devices, against one device.

    python -m tests.given.models.sharded [NAMES]      measures anew, all or those named, and writes ``sharded.json``

The file has the larger NMSE of all rows and of the worst row for each model and number of devices; docs/models.md
shows it. All tokens of a model's golden are run in one batch, exactly, in split mode tensor.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model

from . import rwkv
from .architectures import ALL, FOLDER, golden, write_model
from .goldens import F64, nmse

RESULTS = FOLDER / "sharded.json"
COUNTS = (2, 3)


def measure_errors(name: str) -> dict[str, float]:
    """The NMSE of each number of devices."""
    own = name in rwkv.KINDS
    tokens = rwkv.TOKENS if own else golden(name)[0]
    with tempfile.TemporaryDirectory() as folder:
        model = open_model(
            rwkv.write_rwkv_model(name, Path(folder) / "model.gguf") if own else write_model(name, Path(folder))
        )

        def logits(group: DeviceGroup) -> F64:
            session = Session(model, on=group)
            return session.evaluate([tokens], every_position=True, hidden=model.is_encoder_without_logits)[0]

        one = logits(DeviceGroup(exact=True))
        groups = {
            n: DeviceGroup(devices=tuple(f"cpu:{i}" for i in range(n)), split_mode="tensor", exact=True) for n in COUNTS
        }
        return {str(n): float(f"{nmse(logits(group), one):.1e}") for n, group in groups.items()}


def write(names: list[str]) -> None:
    """Measure these models; a model is kept as soon as it is measured."""
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    for name in names:
        results[name] = measure_errors(name)
        sys.stdout.write(f"{name} {results[name]}\n")
        sys.stdout.flush()
        rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(results[key])}" for key in sorted(results))
        RESULTS.write_text(f"{{\n{rows}\n}}\n", "utf-8")


if __name__ == "__main__":
    write(sys.argv[1:] or [*ALL, *rwkv.KINDS])
