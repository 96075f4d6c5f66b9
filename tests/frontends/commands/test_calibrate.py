"""`hocket calibrate --devices`: another device group is measured, and the speeds of the others stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket.cli import main
from hocket.frontends.commands import calibrate
from hocket.frontends.inference.device_group import DeviceGroup, resolve_devices
from hocket.scheduler.costs.calibration_file import (
    Speeds,
    format_calibrated_with_day,
    format_saved_speeds_key,
    make_saved_speeds_path,
    read_speeds,
    write_speeds,
)

from ...given.commands import Capture

OLD, NEW = (Speeds({"f32": rate}, {"f32": 1e9}, 3e-6, 5e9, 7e-6, unpacking={"f32": 8e9}) for rate in (20e9, 30e9))


def test_a_group_that_is_measured_later_leaves_the_other_groups_as_they_were(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(calibrate, "measure_speeds", lambda group, **_: NEW)
    one, three = (resolve_devices(DeviceGroup(devices=("numpy:0", "numpy:1", "numpy:2")[:n])) for n in (1, 3))
    write_speeds({format_saved_speeds_key(one): OLD}, "earlier")
    assert main(["calibrate", "--quick", "--devices", "numpy:0,numpy:1,numpy:2"]) == 0
    assert "numpy with" in capsys.readouterr().out
    expected = {format_saved_speeds_key(one): OLD, format_saved_speeds_key(three): NEW}
    assert read_speeds(make_saved_speeds_path()) == expected
    assert [format_calibrated_with_day(group).split(", ")[-1] for group in (one, three)] == ["earlier", "quick"]
