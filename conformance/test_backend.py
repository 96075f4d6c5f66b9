"""One test for each case.  It imports nothing: run from a checkout, pytest gives this file another package's name, so
that everything comes from the plugin, which was imported as what it is."""

from __future__ import annotations


def test_a_backend_computes_what_the_op_means(conformance_case, judge):
    judge(conformance_case)
