"""Binds collectives to NCCL or RCCL, which sum over all devices and send dense bytes between two devices.

An exchange is a step between launches that runs a group of library transfers. `all_reduce` is a sum of the library. Its
order is chosen by the library and is the same on all devices. All other collectives are messages between pairs of
devices, which are sent together:

1. Pack the slices for each receiver into one dense message, if they are not contiguous.
2. Send and receive all messages as one group.
3. Unpack each message into the result. `reduce_scatter` adds the messages in the order of the devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from ....graph.attrs import Attrs
from ....graph.dtypes import DType
from ....graph.errors import BackendError
from ....ops.collectives import cast_to_index_ranges, narrow_to_integer
from ...base import Tensor, contiguous_strides
from ...fusion.operands import BoundInstruction, Operand, require_supported
from ...host.collectives import (
    Index,
    Pairs,
    compute_all_gather_slice_pairs,
    compute_all_to_all_slice_pairs,
    compute_reduce_scatter_slice_pairs,
)
from ..binding.launch_builder import LaunchBuilder
from ..device.driver import CollectiveLibraryExchange, CollectiveLibraryTransfer, Communicator
from ..kernels.collective import (
    COLLECTIVE_TYPE_NAMES,
    MAX_DEVICES,
    PeerGroup,
    launch_bfloat16_rounding,
    launch_bfloat16_widening,
    launch_peer_sum,
    launch_progress_mark,
    slice_operand,
)
from ..kernels.elementwise import MAX_ELEMENTS
from ..kernels.moves import launch_broadcast_and_convert

REDUCIBLE_DTYPES = (DType.F32, DType.I8, DType.I32, DType.I64)
"""Dtypes that the library can sum."""
TransferPairFinder = Callable[[Attrs, int, int], Pairs]
"""A function of attributes, receiver and sender: pairs of a slice of the result and a slice of sender's operand."""


def bind_library_collective(
    launches: LaunchBuilder, call: BoundInstruction, group: PeerGroup, ring: Communicator
) -> None:
    """Add a collective to the launches, as an exchange of a library such as NCCL with the copies that it needs.

    Raises:
        NoKernelError: The library cannot run the collective. Either all devices of the group raise it, or none.
    """
    EXCHANGE_BINDERS[call.op](launches, call, group, ring)


def _add_exchange_with_progress_marks(
    launches: LaunchBuilder,
    call: BoundInstruction,
    group: PeerGroup,
    ring: Communicator,
    transfers: Iterable[CollectiveLibraryTransfer],
) -> None:
    """Add a library exchange to the launches, with a progress mark of this device before and after it.

    Empty transfers are left out.
    """
    if filled := tuple(t for t in transfers if t.count):
        launch_progress_mark(launches, call, group, has_results=0)
        launches.items.append(CollectiveLibraryExchange(ring, filled, launches.number))
        launch_progress_mark(launches, call, group, has_results=1)


def _make_send_or_receive(op: str, x: Operand, other: int) -> CollectiveLibraryTransfer:
    """Make a library transfer that sends all bytes of an operand to another device, or receives them from there.

    Args:
        op: ``send`` or ``receive``.
        x: The dense operand.
        other: Rank of the other device.
    """
    return CollectiveLibraryTransfer(op, x.address, x.address, x.tensor.spec.nbytes, DType.I8, other)


def _bind_all_reduce(launches: LaunchBuilder, call: BoundInstruction, group: PeerGroup, ring: Communicator) -> None:
    offers = group.list_device_operands(narrow_to_integer(call.attrs["sequence"]))
    if len({(o.source.shape, o.source.dtype) for o in offers}) > 1:
        raise BackendError("devices sum values that are not alike: the plans of the devices do not match")
    source, out = call.operand(0), call.out
    require_supported(
        out.dtype in REDUCIBLE_DTYPES and out.dtype is source.dtype, f"the library has no sums of {out.dtype}"
    )
    require_supported(math.prod(out.shape) < MAX_ELEMENTS, "operands are too large")
    own = _pack_slices_unless_dense(launches, [source])
    total = out if out.is_dense else launches.allocate_scratch(out.shape, out.dtype)
    count = math.prod(out.shape)
    if group.uses_bfloat16_transfer(out):
        wire = launches.allocate_scratch((count,), DType.BF16)
        launch_bfloat16_rounding(launches, own, wire)
        sums = CollectiveLibraryTransfer("all_reduce", wire.address, wire.address, count, DType.BF16)
        _add_exchange_with_progress_marks(launches, call, group, ring, [sums])
        launch_bfloat16_widening(launches, wire, total, group)
    else:
        sums = CollectiveLibraryTransfer("all_reduce", own.address, total.address, count, out.dtype)
        _add_exchange_with_progress_marks(launches, call, group, ring, [sums])
    if total is not out:
        launch_broadcast_and_convert(launches, total, out)


def _make_slice_exchange_binder(find_pairs: TransferPairFinder, *, is_sum: bool = False) -> ExchangeBinder:
    """Return the function that adds a collective as messages of slices between pairs of devices, such as an all-gather.

    Args:
        find_pairs: Returns the slices that a receiver needs from a sender.
        is_sum: Whether the receiver sums the slices of all senders instead of storing them.
    """

    def bind_slices(launches: LaunchBuilder, call: BoundInstruction, group: PeerGroup, ring: Communicator) -> None:
        offers = group.list_device_operands(narrow_to_integer(call.attrs["sequence"]))
        operands = [x for o in offers for x in (o.source, o.target)]
        require_supported(
            all(x.dtype is call.out.dtype and x.dtype in COLLECTIVE_TYPE_NAMES for x in operands),
            "operands are of several types",
        )
        require_supported(max(math.prod(x.shape) for x in operands) < MAX_ELEMENTS, "operands are too large")
        require_supported(not is_sum or len(offers) <= MAX_DEVICES, "so many devices are not summed")
        own, out, me = call.operand(0), call.out, group.rank
        others = [d for d in range(len(offers)) if d != me]
        outgoing = _pack_messages_by_receiver(
            launches, own, {d: [index for _, index in find_pairs(call.attrs, d, me)] for d in others}
        )
        incoming = {d: _choose_receive_buffer(launches, out, find_pairs(call.attrs, me, d), is_sum) for d in others}
        transfers = [_make_send_or_receive("send", message, d) for d, message in outgoing.items()]
        transfers += [_make_send_or_receive("receive", message, d) for d, (message, _) in incoming.items()]
        _add_exchange_with_progress_marks(launches, call, group, ring, transfers)
        received = {d: parts for d, (_, parts) in incoming.items()}
        received[me] = [slice_operand(own, index) for _, index in find_pairs(call.attrs, me, me)]
        targets = {
            d: [slice_operand(out, into) for into, _ in find_pairs(call.attrs, me, d)] for d in range(len(offers))
        }
        if is_sum:
            for number, target in enumerate(targets[me]):
                launch_peer_sum(launches, [received[d][number] for d in range(len(offers))], target, group)
            return
        for d, parts in received.items():
            for part, target in zip(parts, targets[d], strict=True):
                if part.address != target.address:
                    launch_broadcast_and_convert(launches, part, target)

    return bind_slices


def _pack_messages_by_receiver(
    launches: LaunchBuilder, x: Operand, indices: Mapping[int, Sequence[Index]]
) -> dict[int, Operand]:
    """Pack the slices for each receiving device into one dense message; return the messages by device.

    Devices that receive equal slices share one message.
    """
    by_index: dict[str, Operand] = {}
    messages = {}
    for device, slices in indices.items():
        if (key := str(slices)) not in by_index:
            by_index[key] = _pack_slices_unless_dense(launches, [slice_operand(x, index) for index in slices])
        messages[device] = by_index[key]
    return messages


def _pack_slices_unless_dense(launches: LaunchBuilder, parts: Sequence[Operand]) -> Operand:
    """Return one dense operand with all parts in order; a single dense part is returned as it is, without a copy."""
    if len(parts) == 1 and parts[0].is_dense:
        return parts[0]
    whole = launches.allocate_scratch((sum(math.prod(p.shape) for p in parts),), parts[0].dtype if parts else DType.I8)
    for part, target in zip(parts, _split_with_shapes_of(whole, parts), strict=True):
        launch_broadcast_and_convert(launches, part, target)
    return whole


def _choose_receive_buffer(
    launches: LaunchBuilder, out: Operand, pairs: Pairs, is_sum: bool
) -> tuple[Operand, list[Operand]]:
    """Choose the memory that receives a message from another device.

    A message that is one dense slice of the result, and is not summed, goes directly into the result. Other messages go
    into scratch memory.

    Args:
        launches: Allocates the scratch memory.
        out: The result.
        pairs: Pairs (index into the result, index into the sender's operand), one for each slice of the message.
        is_sum: Whether the received slices are summed.

    Returns:
        The dense buffer, and its parts, one for each slice.
    """
    targets = [slice_operand(out, into) for into, _ in pairs]
    if len(targets) == 1 and targets[0].is_dense and not is_sum:
        return targets[0], targets
    whole = launches.allocate_scratch((sum(math.prod(t.shape) for t in targets),), out.dtype)
    return whole, _split_with_shapes_of(whole, targets)


def _split_with_shapes_of(whole: Operand, like: Sequence[Operand]) -> list[Operand]:
    """Split a dense operand into consecutive dense parts with the shapes of the operands in `like`."""
    parts, start = [], 0
    for x in like:
        dense = Tensor(-1, start, x.shape, contiguous_strides(x.shape), whole.dtype)
        parts.append(Operand(whole.address + start, dense))
        start += dense.spec.nbytes
    return parts


def _bind_send(launches: LaunchBuilder, call: BoundInstruction, group: PeerGroup, ring: Communicator) -> None:
    require_supported(_has_copy_kernel(call.out), "kernels that copy this type are missing")
    if call.operand(0).address != call.out.address:
        launch_broadcast_and_convert(launches, call.operand(0), call.out)
    message = _pack_slices_unless_dense(launches, [call.out])
    _add_exchange_with_progress_marks(
        launches, call, group, ring, [_make_send_or_receive("send", message, narrow_to_integer(call.attrs["to"]))]
    )


def _bind_receive(launches: LaunchBuilder, call: BoundInstruction, group: PeerGroup, ring: Communicator) -> None:
    source = narrow_to_integer(call.attrs["source"])
    sent = group.require_device_operands(source, narrow_to_integer(call.attrs["sequence"])).source
    require_supported(_has_copy_kernel(sent), "kernels that copy this type are missing")
    if sent.dtype is not call.out.dtype or sent.shape != call.out.shape:
        raise BackendError("a device receives what none sends: the plans of the devices do not match")
    buffer = call.out if call.out.is_dense else launches.allocate_scratch(call.out.shape, call.out.dtype)
    _add_exchange_with_progress_marks(launches, call, group, ring, [_make_send_or_receive("receive", buffer, source)])
    if buffer is not call.out:
        launch_broadcast_and_convert(launches, buffer, call.out)


def _has_copy_kernel(sent: Operand) -> bool:
    """Return whether a kernel can copy the operand `sent`, which depends on its dtype and size.

    Sender and receiver test the same operand, so they get the same answer.
    """
    return sent.dtype in COLLECTIVE_TYPE_NAMES and math.prod(sent.shape) < MAX_ELEMENTS


def _find_reduce_scatter_pairs(attrs: Attrs, receiver: int, sender: int) -> Pairs:
    """Return the slice that `receiver` sums in a `reduce_scatter`, as pairs of indices into result and operand.

    The slice is the same for each sender.
    """
    assert sender < len(cast_to_index_ranges(attrs["runs"]))
    return compute_reduce_scatter_slice_pairs({**attrs, "rank": receiver})


ExchangeBinder = Callable[[LaunchBuilder, BoundInstruction, PeerGroup, Communicator], None]
EXCHANGE_BINDERS: Mapping[str, ExchangeBinder] = {
    "all_reduce": _bind_all_reduce,
    "all_gather": _make_slice_exchange_binder(
        lambda attrs, receiver, sender: compute_all_gather_slice_pairs(attrs)[sender]
    ),
    "all_to_all": _make_slice_exchange_binder(
        lambda attrs, receiver, sender: compute_all_to_all_slice_pairs({**attrs, "rank": receiver})[sender]
    ),
    "reduce_scatter": _make_slice_exchange_binder(_find_reduce_scatter_pairs, is_sum=True),
    "send": _bind_send,
    "receive": _bind_receive,
}
