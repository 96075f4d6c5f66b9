"""One test for each case of the conformance kit. The fixtures come from `conformance.plugin`.

The file imports nothing of hocket, because pytest gives it another package name in a checkout.
"""

from __future__ import annotations


def test_a_backend_computes_what_the_op_means(conformance_case, case_runner):
    case_runner(conformance_case)
