"""The mathematics of TROLL: needs only torch, and imports nothing else of the project."""
