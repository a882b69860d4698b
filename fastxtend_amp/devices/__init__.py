"Devices: facts about each, and support for sharded parameters (FSDP2) and XLA."
