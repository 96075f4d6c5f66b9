"""The command: the settings of its process before NumPy loads, and the modules that it need not import."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_and_split(code: str) -> list[str]:
    """The words that a new process prints."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.split()


def test_the_package_imports_what_is_used_alone():
    code = "import hocket, sys; print('numpy' in sys.modules, hocket.ModelError.__name__, 'numpy' in sys.modules)"
    assert run_and_split(code)[:2] == ["False", "ModelError"]


def test_one_of_several_processes_imports_no_more():
    code = (
        "import os; os.environ.update(PMI_RANK='1', PMI_SIZE='2')\n"
        "import hocket, sys; print('numpy' in sys.modules, 'hocket.distributed.presence' in sys.modules)"
    )
    assert run_and_split(code) == ["False", "True"]


def test_every_name_of_the_package_is_there_and_named():
    code = (
        "import hocket; from hocket import *\n"
        "print(all(hasattr(hocket, name) for name in dir(hocket)), 'Model' in dir(hocket), Model is hocket.Model)"
    )
    assert run_and_split(code) == ["True", "True", "True"]


def test_the_command_is_parsed_before_numpy_is_imported():
    with open(ROOT / "pyproject.toml", "rb") as file:
        assert tomllib.load(file)["project"]["scripts"]["hocket"] == "hocket.__main__:main"
    code = (
        "import os, sys; os.environ.pop('OPENBLAS_THREAD_TIMEOUT', None); sys.argv = ['hocket', '--version']\n"
        "from hocket.__main__ import main\n"
        "print('numpy' in sys.modules); main(); print(os.environ['OPENBLAS_THREAD_TIMEOUT'])"
    )
    assert run_and_split(code) == ["False", "hocket", __import__("hocket").__version__, "20"]


def test_a_library_keeps_the_settings_of_its_process():
    code = (
        "import os; before = dict(os.environ); import hocket.cli, gc; print(before == os.environ, gc.get_threshold())"
    )
    assert run_and_split(code)[0] == "True"


INTERRUPTED_START = """
import os, signal, sys, time

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == "hocket.cli":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupter())
from hocket.__main__ import main
main()
"""


def test_an_interrupt_during_the_imports_of_a_command_prints_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_START], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
