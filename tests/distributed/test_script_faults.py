"""A script of the Python API in which one rank goes wrong: at each moment all ranks end, and say which rank and why."""

from __future__ import annotations

import pytest

from ..given.models.goldens import TINY
from ..given.ranks import script
from ..given.ranks.mpi import hocket_in, mpiexec, needs_mpi

MOMENTS = ("before the import", "before load", "during load", "during a run", "between runs", "after")
MESSAGES = {"raises": "RuntimeError: rank 1 is unwell", "exits": "its program ended", "stopped": "stopped"}


def run_script(moment, fault):
    return mpiexec(3, script.__file__, moment, fault)


@pytest.mark.nightly(cases=4)
@needs_mpi
@pytest.mark.long
@pytest.mark.parametrize("fault", MESSAGES)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_script_with_a_rank_that_goes_wrong_ends(moment, fault):
    done = run_script(moment, fault)
    if moment == "after" and fault == "exits":  # all have done their work
        assert done.code == 0, done
        return
    assert done.code, done
    if moment == "after" and fault == "raises":  # no other rank needs it any more
        assert MESSAGES[fault] in done.err
        return
    expected = "it has not imported hocket" if moment == "before the import" and fault != "stopped" else MESSAGES[fault]
    if moment == "during load" and fault == "exits":
        expected = "SystemExit: 0"
    assert has_named(done, expected), done


@needs_mpi
@pytest.mark.long
def test_a_script_with_a_rank_that_hangs_between_runs_ends():
    done = run_script("between runs", "hangs")
    assert done.code, done
    assert has_named(done, "it hangs"), done


def has_named(done, why):
    """Whether a line names rank 1 and says `why`."""
    return any("rank 1 on " in line and why in line for line in done.err.splitlines())


@needs_mpi
@pytest.mark.nightly(cases=2)
@pytest.mark.long(cases=1)
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_launcher_ends_a_script_of_which_a_rank_is_killed(moment):
    assert run_script(moment, "killed").code


@needs_mpi
@pytest.mark.nightly(cases=2)
@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", TINY, "--foo"), "there is no flag '--foo'"),
        (("bogus",), "there is no command 'bogus'"),
        (("run", TINY, "-p", "a", "--devices", "metal"), "there is no backend for device kind 'metal'"),
        (("run", TINY, "-p", "a", "-c", "1000000"), "--ctx-size is 1000000"),
    ],
    ids=["flag", "command", "device", "context"],
)
def test_wrong_usage_is_reported_once_and_ends_with_2(words, message):
    done = hocket_in(2, *words)
    assert done.code == 2, done
    assert done.err.count(message) == 1, done
    assert "BAD TERMINATION" not in done.out + done.err
    assert "None" not in done.err
    assert len(done.err.splitlines()) == 1


@needs_mpi
@pytest.mark.long
def test_a_keeper_that_is_stopped_ends_all():
    done = hocket_in(
        2, "run", TINY, "-n", 9, "--temp", 0, "--ignore-eos", "-p", "a", "--devices", "numpy:0", fault="keeper"
    )
    assert done.code, done
    assert any("rank 1 on " in line and "was stopped (SIGSTOP)" in line for line in done.lines), done
