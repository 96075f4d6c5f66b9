"""Speeds of ops, next to the limits of the machine."""

import pytest

from hocket.backends import find_device
from hocket.conformance import parse_case
from hocket.conformance.command import main
from hocket.conformance.reports import op_speed


@pytest.mark.long
def test_speed_is_measured_beside_the_limits_of_the_machine(capsys):
    assert main(["--perf", "--case", "rms_norm(x=f32[64,256])"]) == 0
    text = capsys.readouterr().out
    assert "GB/s" in text.splitlines()[0]
    assert "GFLOP/s" in text.splitlines()[1]
    assert "rms_norm(x=f32[64,256]" in text


def test_the_limit_of_a_product_is_that_of_its_weights_type(monkeypatch):
    flops = {"f32": 100, "q4_0": 800}

    def measure_case(case, backend, device):
        dtype = case.operands[0][1].dtype.text
        return op_speed.OpSpeed(case, 1.0, 0.0, nbytes=10, flops=flops[dtype] if case.op == "mul_mat" else 0, cold=True)

    monkeypatch.setattr(op_speed, "measure_op_speed_with_cold_buffers", measure_case)
    limits = op_speed.MeasuredLimits(*find_device("cpu"))
    packed = parse_case("mul_mat(w=q4_0[64,256], x=f32[16,256])")
    plain = parse_case("scale(x=f32[64,256], scale=2.0)")
    assert (
        limits.bandwidth,
        limits.measure_matmul_flops_per_second_for_case(packed),
        limits.measure_matmul_flops_per_second_for_case(plain),
    ) == (10, 800, 100)
    assert op_speed.OpSpeed(packed, 1.0, 0.0, nbytes=1, flops=400, cold=True).compute_fraction_of_limit(limits) == 0.5
