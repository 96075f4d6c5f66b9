"""The packet link over MPI, through mpi4py, which is imported at the first use."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from ..graph.errors import BackendError, format_install_command
from .packet_link import Packet
from .presence import AbsentRankDetector
from .world import FirstRankFailure, RanksError

INSTALL_HINT = format_install_command("mpi")
PAUSE = 1e-3
"""Seconds between two polls for the arrival of all ranks."""


class MpiLink:
    """The packet link that sends packets as MPI messages.

    The channel of a packet is the MPI tag.

    Args:
        communicator: A communicator of mpi4py, which is duplicated. Without it, MPI is started, and `close` ends MPI.
    """

    def __init__(self, communicator: Any = None) -> None:
        self._starts = communicator is None
        self._mpi = _import_and_start_mpi(starts=self._starts)
        if self._mpi.Query_thread() < self._mpi.THREAD_MULTIPLE:
            raise BackendError("this MPI was started without MPI_THREAD_MULTIPLE; let hocket start it")
        self._comm = self._duplicate_communicator_after_arrival(
            self._mpi.COMM_WORLD if communicator is None else communicator
        )
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self.host = str(self._mpi.Get_processor_name())
        self._coming: dict[tuple[int, int], tuple[Any, Packet]] = {}
        self._sending: list[tuple[Any, Packet]] = []
        self._lock = threading.Lock()
        self._windows: list[Any] = []

    def _duplicate_communicator_after_arrival(self, communicator: Any) -> Any:
        """Duplicate an MPI communicator, once all ranks have arrived.

        Raises:
            RanksError: A rank of this machine will never arrive.
        """
        if not self._starts:  # the ranks of a command have supervisors
            group = communicator.Get_group()
            ranks = self._mpi.Group.Translate_ranks(group, None, self._mpi.COMM_WORLD.Get_group())
            places = {rank: place for place, rank in enumerate(ranks)}
            absent, all_came = AbsentRankDetector(places), communicator.Ibarrier()
            while not all_came.Test():
                if (found := absent.find_absent_rank()) is not None:
                    raise RanksError(str(FirstRankFailure(places[found[0]], self._mpi.Get_processor_name(), found[1])))
                time.sleep(PAUSE)
        return communicator.Dup()  # waits for all ranks without a timeout

    def send(self, to: int, channel: int, packet: Packet) -> Any:
        request = self._comm.Isend([packet, self._mpi.BYTE], to, channel)
        with self._lock:  # MPI reads the packet after this call
            self._sending = [(r, p) for r, p in self._sending if not r.Test()]
            self._sending.append((request, packet))
        return request

    def is_sent(self, posted: Any) -> bool:
        with self._lock:  # two threads must not test one request at once, and `send` tests it, too
            return bool(posted.Test())

    def try_receive(self, source: int, channel: int) -> Packet | None:
        key = (source, channel)
        if key not in self._coming:
            status = self._mpi.Status()
            message = self._comm.Improbe(source, channel, status)
            if message is None:
                return None
            packet = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
            self._coming[key] = (message.Irecv([packet, self._mpi.BYTE]), packet)
        request, packet = self._coming[key]
        if not request.Test():
            return None
        del self._coming[key]
        return packet

    def allocate_shared_words(self, words: int) -> npt.NDArray[np.int64] | None:
        machine = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        try:
            if machine.Get_size() < self.size:
                return None
            window = self._mpi.Win.Allocate_shared(8 * words if self.rank == 0 else 0, 8, comm=machine)
        finally:
            machine.Free()
        self._windows.append(window)
        memory, _ = window.Shared_query(0)
        array = np.frombuffer(memory, np.int64, words)
        if self.rank == 0:
            array[:] = 0
        self._comm.Barrier()
        return array

    def close(self) -> None:
        self._comm.Barrier()
        for window in self._windows:
            window.Free()
        self._comm.Free()
        if self._starts:
            self._mpi.Finalize()


def _import_and_start_mpi(*, starts: bool) -> Any:
    """Import the module `mpi4py.MPI`, start MPI if it does not run yet, and return the module.

    Args:
        starts: Whether hocket starts and ends MPI itself, instead of mpi4py.

    Raises:
        BackendError: mpi4py or an MPI library is missing.
    """
    try:
        import mpi4py

        if starts:
            mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as why:  # the MPI library itself may be missing
        problem = str(why).partition("\n")[0]
        raise BackendError(f"several processes need mpi4py and an MPI library ({problem}); {INSTALL_HINT}") from None
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI
