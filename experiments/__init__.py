"""The results of the study: from run folders to tables in `docs/results/`, and from these to the pages of results."""
