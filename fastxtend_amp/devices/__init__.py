"What XLA devices, sharded parameters (FSDP2) and `DataParallel` need beside the core."
