"""An accelerator made of host threads and host memory, so that what runs on GPUs and NPUs runs in the tests.

`building` compiles it, `stand_in` makes it torch.cuda or torch.npu in a process that has not imported torch, and
`process_group` its collectives NCCL's or HCCL's. `tests.worlds.on_ranks` has such processes take cases. What it is and
what it finds: the head of each file in ``csrc``.
"""
