"""The text of each planted fault occurs exactly once in the kernels; this needs no compiler.

Tests that plant faults take a part of a table in each run, so that a kernel may change without their notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from hocket.backends.cupy.device.driver import read_kernel_text

from ...given.devices.inefficiencies import MACHINE_CODE_FAULTS, MEMORY_FAULTS
from ..kernels import (
    test_attention_blocks,
    test_delta_layer,
    test_elements,
    test_float_products,
    test_recurrences,
    test_sorting,
)
from ..several_devices import test_collectives, test_wire
from . import (
    test_attention_faults,
    test_chain_faults,
    test_cluster_faults,
    test_delta_faults,
    test_early_faults,
    test_faults,
    test_product_faults,
    test_role_faults,
    test_warpgroup_faults,
)

TABLES = {
    "attention": test_attention_faults.FAULTS.values(),
    "attention over blocks": test_attention_blocks.FAULTS.values(),
    "chains": test_chain_faults.PLANTS.values(),
    "clusters": (
        *test_cluster_faults.STOPPED.values(),
        *((test_cluster_faults.FILE, *plant) for plant in test_cluster_faults.MISPLACED.values()),
    ),
    "collectives": (("collective.cu", *plant) for plant in test_collectives.PLANTS.values()),
    "delta layers": (test_delta_layer.FAULTS | test_delta_layer.PRODUCT_FAULTS).values(),
    "delta nets": (
        *(fault[1:] for fault in test_delta_faults.FAULTS.values()),
        *test_delta_faults.LONG_FAULTS.values(),
        *test_delta_faults.LONG_BARRIERS.values(),
        *((test_delta_faults.CLUSTERS, *fault) for fault in test_delta_faults.IN_CLUSTERS.values()),
        *((test_delta_faults.CLUSTERS, *fault) for fault in test_delta_faults.HIDDEN.values()),
    ),
    "early": test_early_faults.PLANTED.values(),
    "elements": (("elements.cuh", *plant) for plant in test_elements.FAULTS),
    "float products": (
        *(("products.cu", *plant) for plant in test_float_products.PLANTS.values()),
        *(("dense.cu", *plant) for plant in test_float_products.OF_FEW.values()),
    ),
    "inefficiencies": (*MEMORY_FAULTS.values(), *MACHINE_CODE_FAULTS.values()),
    "products": test_product_faults.PLANTS.values(),
    "recurrences": (("recurrences.cu", *plant) for plant in test_recurrences.PLANTS.values()),
    "roles": (*test_role_faults.STOPPED.values(), *test_role_faults.RACES.values()),
    "several": ((plant.file, plant.old, plant.new) for plant in test_faults.PLANTS),
    "sorting": test_sorting.PLANTS.values(),
    "warpgroups": test_warpgroup_faults.PLANTS.values(),
    "wire": (("collective.cu", *plant) for plant in test_wire.PLANTS.values()),
}


def missing(plants: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield the texts that do not occur exactly once in their file, and edits without effect."""
    for file, old, new, *_ in plants:
        count = read_kernel_text(file).count(old)
        if count != 1 or old == new:
            yield f"{count} times in {file}: {old}"


@pytest.mark.parametrize("plants", [pytest.param(list(plants), id=name) for name, plants in TABLES.items()])
def test_what_a_mistake_is_planted_in_is_there(plants):
    assert plants
    assert not list(missing(plants))


def test_a_missing_text_is_reported():
    assert list(missing([("moves.cu", "no such text", ""), ("moves.cu", "each_column(", "each_column(")]))
