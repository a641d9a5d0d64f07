"""The Hydra group `troll`, for verl's command line: `+troll=fsdp` or `+troll=megatron`."""
