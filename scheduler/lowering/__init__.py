"""Lowering of a device graph to a program: strided views, execution order, memory, state saves and unrolling."""
