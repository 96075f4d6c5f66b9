"""The proof of a plan: that its programs, run by its devices, give what the user's graph means, whoever made them.

Everything a plan is made of is checked, or is free: no run depends on it, so that it cannot be wrong.  Stages, cost
and digest are computed from the rest.  Field by field:

Plan
    graph: obeys the rules of graphs; everything else is held against it
    lanes: one at least, no device twice; together they compute the graph
    leaves: just the graph's leaves; each lies as said where devices read it, and all of it somewhere
    outputs: just the graph's outputs; each ends as said
    cuts: each an axis of a leaf that is cut there or placed; segments and places serve later plans, whose layouts are
        held against what lies on the devices
    reasons: free, words for people
    hardware: speeds above zero; free otherwise, as predictions are
    placed: nodes and devices that there are; each node is computed there only
    host: as hardware
    shares: none, or one a device, none negative, one above zero; later plans follow them
    spare: names of devices that take no part, none twice
Lane
    device: the backend has it
    backend: keeps every dtype and runs every node as the program presupposes
    graph: legal, and each node one of the user's graph on the entries its operands hold
    program: runs that graph
Device
    kind: that of the backend
    index: one that the backend has, not negative
    memory: free, what the caller says
    memory_of: free, what the caller says
    description: free, words for people
    part: not negative
    rank: named by all devices or by none, not negative; what runs the plan refuses one that is not there
Program
    buffers: the arena, then each weight, state and constant of the graph once
    instructions: each node that computes once, and each copy of a new state; every read finds its value whole
    inputs: just the graph's inputs, dense and apart in the arena, in the dtype that is kept
    outputs: just the graph's outputs, each lying there at the end
    undo: after a step that failed, every state is what it was
BufferSpec
    kind: a leaf's, each leaf once; the first is the arena
    name: the leaf's
    nbytes: those of what is stored; of the arena, as far as its last value reaches, in whole lines of `ALIGNMENT`
    declared: the leaf's spec on the device
    stored: as the backend keeps that
Instruction
    op: the node's
    src: the node's operands, as its views lie, dense where the kernel wants that
    dst: the node's results, dense, where nothing lies that is still needed
    attrs: the node's
    scratch: as many bytes as the backend asks for, where nothing lies that is still needed
    node: the name that messages give the node
    index: a node that computes, each once; -1 for what saves or copies a state
Tensor
    buffer: where the value lies at that step
    offset: where it begins, or its view does
    shape: the value's
    strides: those of the view
    dtype: the one in which the backend keeps the value
Spec
    shape: that of the leaf, the node or the buffer that has it
    dtype: likewise
Graph
    outputs: in a device's graph the user's, or what others wait for; of the user's graph all are compared
    updates: each state's new value, on all devices that have a part of it
    nodes: follow from outputs and updates
Node
    op: that of a node of the user's graph, or of a conversion that leaves its values as they are
    src: values that are what the user's node reads
    attrs: the user's, but for sizes and rows of a share
    specs: those that the op infers
    name: of a leaf its key; of others the name that instructions give
Value
    node: one of the graph
    index: a result that the node has
Shard
    axis: one of the value
    runs: pairs within the axis, for each device, all entries on some device; what each device holds follows from them
Local
    devices: one at least, each one of the plan
Placed
    device: one of the plan
    because: free, words for people
    nodes: of the user's graph, each once
Hardware
    flops: above zero, finite; free otherwise
    bandwidth: likewise
    launch: not negative, finite; free otherwise
    link_bandwidth: above zero, finite; free otherwise
    link_latency: not negative, finite; free otherwise
    machine: not negative; free otherwise
    across_bandwidth: above zero, finite; free otherwise
    across_latency: not negative, finite; free otherwise
    plain_flops: likewise
    alone_flops: at least one, finite; free otherwise
    alone_bandwidth: likewise
    value_bandwidth: not negative, finite; free otherwise
    recurrent_flops: likewise
    unpack_bandwidth: likewise
    op_flops: above zero, finite, all of them; free otherwise
    op_bandwidth: likewise
    source: free, words for people
"""
