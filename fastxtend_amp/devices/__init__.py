"Devices: facts about each, and what sharded parameters (FSDP2) and XLA devices need besides."
