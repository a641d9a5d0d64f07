"""The Hydra group `troll`, for verl's command line: `hydra.searchpath=[pkg://troll.verl.config] +troll=fsdp`."""
