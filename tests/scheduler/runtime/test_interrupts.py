"""Interrupts (SIGINT) during runs: they wait for the end of a run, except during work that may stop anywhere."""

from __future__ import annotations

import signal

import pytest

from hocket.scheduler import DeferredInterrupts, ImmediateInterrupts


def test_an_interrupt_in_an_immediate_block_does_not_wait():
    steps = []

    def work() -> None:
        with DeferredInterrupts():
            steps.append("run")
            with ImmediateInterrupts():
                signal.raise_signal(signal.SIGINT)
                steps.append("compile")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["run"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_after_an_immediate_block_waits_again():
    steps = []

    def work() -> None:
        with DeferredInterrupts():
            with ImmediateInterrupts():
                steps.append("compile")
            signal.raise_signal(signal.SIGINT)
            steps.append("run")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["compile", "run"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_before_an_immediate_block_waits_for_the_end():
    steps = []

    def work() -> None:
        with DeferredInterrupts():
            signal.raise_signal(signal.SIGINT)
            with ImmediateInterrupts():
                steps.append("compile")
            steps.append("run")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["compile", "run"]


def test_an_immediate_block_alone_changes_no_handler():
    with ImmediateInterrupts():
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
