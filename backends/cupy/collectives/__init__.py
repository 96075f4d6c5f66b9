"""Collectives of a device group over peer memory, with NCCL or RCCL, or through host memory."""
