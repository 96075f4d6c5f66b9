"""Kernels of decoding compile for an AMD device with waves of 64 lanes.

With ``--every-architecture`` all kernels do.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hocket.backends.cupy.device import hiprtc
from hocket.backends.cupy.device.driver import KERNEL_FOLDER, KernelSource, find_kernel_files, read_kernel_text
from hocket.backends.cupy.kernel_table import SOURCES
from hocket.graph.errors import BackendError

from ...given.devices.tools import needs

ARCHITECTURE = "gfx90a"
OF_PROMPTS = (
    "attention_roles.cu",
    "attention_short.cu",
    "attention_tiles.cu",
    "attention_warpgroups.cu",
    "attention_wide.cu",
    "clusters.cu",
    "gated_delta_net_clusters.cu",
    "gated_delta_net_prepare.cu",
    "gated_delta_net_scan.cu",
    "product_roles.cu",
    "tiled.cu",
    "warpgroups.cu",
)
"""Files with kernels that multiply matrices; in packed.cu their names begin with ``many``."""


@pytest.fixture(scope="module")
def _compiler():
    needs(hiprtc.load_hiprtc)


def of_decoding(source: KernelSource) -> KernelSource:
    """The source with those kernels only."""
    decode_names = (
        () if source.file in OF_PROMPTS else tuple(name for name in source.names if not name.startswith("many<"))
    )
    return replace(source, names=decode_names)


def pytest_generate_tests(metafunc):
    if "sources" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-architecture")
        some = [hiprtc.prepend_hip_header(s) for s in (SOURCES if every else map(of_decoding, SOURCES)) if s.names]
        by_file = {file: [s for s in some if s.file == file] for file in dict.fromkeys(s.file for s in some)}
        metafunc.parametrize("sources", by_file.values(), ids=by_file)


@pytest.mark.long
@pytest.mark.usefixtures("_compiler")
def test_the_sources_of_a_file_compile(sources):
    for source in sources:
        code = hiprtc.compile(source, ARCHITECTURE)
        assert code.image.startswith(b"\x7fELF")
        assert b".wavefront_size\x40" in code.image, "waves have other than 64 lanes"
        kernels = set(re.findall(rb"\w+\.kd(?=\0)", code.image))
        assert len(kernels) >= len(source.names), f"of {len(source.names)} kernels {len(kernels)} are in the code"


@pytest.mark.usefixtures("_compiler")
def test_what_does_not_compile_is_named():
    with pytest.raises(BackendError) as caught:
        hiprtc.compile(hiprtc.prepend_hip_header(KernelSource("indexer.cu", ("no_such_kernel",))), ARCHITECTURE)
    assert "indexer.cu does not compile for gfx90a" in str(caught.value)
    assert "no_such_kernel" in str(caught.value)


def test_every_file_of_kernels_is_found_by_its_name():
    """Sources name no room, so that two files of one name would stand for each other."""
    assert sorted(find_kernel_files().values()) == sorted(KERNEL_FOLDER.rglob("*.cu*"))


def test_no_other_file_has_inline_assembly_or_asks_what_it_is_compiled_for():
    of_hopper = {name for source in SOURCES if source.architectures == ("sm_90a",) for name in source.before}
    of_all = {name for source in SOURCES if not source.architectures for name in (source.file, *source.before)}
    headers = {name for name in of_hopper - of_all if name.endswith(".cuh") and "asm" in read_kernel_text(name)}
    assert headers == {"wgmma.cuh", "cluster.cuh", "roles.cuh"}, (
        "instructions of one architecture, and no device of AMD"
    )
    for name in find_kernel_files().keys() - {"cuda.cuh", "hip.cuh", "types.cuh", *headers}:
        assert "asm" not in read_kernel_text(name), name
        assert "#if" not in read_kernel_text(name), name
    assert "asm" not in read_kernel_text("hip.cuh")
