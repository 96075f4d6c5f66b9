"""How CUDA devices meet: peers in one memory, rings of NCCL, and who notices that one is lost."""
