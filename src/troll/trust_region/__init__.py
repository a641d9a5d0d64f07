"""The mathematics of TROLL: needs torch alone, and imports nothing else of the project."""
