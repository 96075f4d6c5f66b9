"""The proof of a plan: the programs, run by their devices, compute the user's graph, independent of the planner.

Every field of a plan is checked or free. Free means that no run depends on the field, so it cannot be wrong.
Timeline, cost and digest are computed from the other fields. The fields are:

Plan
    graph: obeys the rules of graphs; all other fields are compared with it
    device_plans: at least one, each device once; together they compute the graph
    leaves: exactly the graph's leaves; each has this layout where devices read it, and all its entries on some
        device
    outputs: exactly the graph's outputs; each has this layout at the end
    sharded_factors: each an axis of a leaf that is sharded there or pinned; segments and places serve later plans
    reasons: free, text for people
    hardware: speeds above zero; apart from that free, because it serves predictions
    pinned_nodes: existing nodes and devices; each node is computed only there
    host: as hardware
    shares: empty, or one number per device, not negative, one above zero; later plans follow them
    unused_devices: names of devices that take no part, each once
DevicePlan
    device: the backend has it
    backend: stores every dtype and runs every node as the program presupposes
    graph: legal, and each node is a node of the user's graph on the entries of its operands
    program: runs this graph
Device
    kind: the kind of the backend
    index: an index that the backend has, not negative
    memory: free, the caller states it
    memory_of: free, the caller states it
    description: free, text for people
    part: not negative
    multiprocessors: positive, only for a part
    rank: set for all devices or for none, not negative; the executor refuses a rank that does not exist
Program
    buffers: the arena, then each weight, state and constant of the graph once
    instructions: each computing node once, and each copy of a new state once; every read finds its complete value
    inputs: exactly the graph's inputs, dense and disjoint in the arena, in the stored dtype
    outputs: exactly the graph's outputs, each in its place at the end
    undo: after a failed run, every state has its old value
BufferSpec
    kind: the kind of a leaf, each leaf once; the first is the arena
    name: the name of the leaf
    nbytes: the bytes of the stored leaf; for the arena the end of its last value, in multiples of `ALIGNMENT`
    declared_spec: the leaf's spec on the device
    stored_spec: the spec in which the backend stores the leaf
Instruction
    op: the op of the node
    src: the node's operands as views, dense where the kernel needs it
    dst: the node's results, dense, in memory that is not needed any more
    attrs: the attributes of the node
    scratch: the bytes that the backend asks for, in memory that is not needed any more
    node: the name of the node in messages
    index: a computing node, each once; -1 for an instruction that saves or copies a state
Tensor
    buffer: the buffer that has the value at this instruction
    offset: the first byte of the value or of its view
    shape: the shape of the value
    strides: the strides of the view
    dtype: the dtype in which the backend stores the value
Spec
    shape: the shape of its leaf, node or buffer
    dtype: the dtype of its leaf, node or buffer
Graph
    outputs: in a device's graph the user's outputs, or messages to other devices; the user's outputs are all
        compared
    updates: the new value of each state, on all devices that have a part of it
    nodes: follow from outputs and updates
Node
    op: the op of a node of the user's graph, or of a conversion that keeps its values
    src: the values that the user's node reads
    attrs: the user's attributes, except sizes and row ranges of a shard
    specs: the specs that the op infers
    name: for a leaf its key; for other nodes the name that instructions use
Value
    node: a node of the graph
    index: a result that the node has
Shard
    axis: an axis of the value
    index_ranges: pairs within the axis, for each device, each entry on some device; the shard of each device follows
        from them
Local
    devices: at least one, each a device of the plan
PinnedNodes
    device: a device of the plan
    because: free, text for people
    nodes: nodes of the user's graph, each once
Hardware
    flops: above zero, finite; apart from that free
    bandwidth: above zero, finite; apart from that free
    launch: not negative, finite; apart from that free
    link_bandwidth: above zero, finite; apart from that free
    link_latency: not negative, finite; apart from that free
    machine: not negative; apart from that free
    across_bandwidth: above zero, finite; apart from that free
    across_latency: not negative, finite; apart from that free
    plain_flops: not negative, finite; apart from that free
    alone_flops: at least one, finite; apart from that free
    alone_bandwidth: at least one, finite; apart from that free
    value_bandwidth: not negative, finite; apart from that free
    recurrent_flops: not negative, finite; apart from that free
    unpack_bandwidth: not negative, finite; apart from that free
    op_flops: above zero, finite, all of them; apart from that free
    op_bandwidth: above zero, finite, all of them; apart from that free
    op_launch: not negative, finite, all of them; apart from that free
    source: free, text for people
"""
