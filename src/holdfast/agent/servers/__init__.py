"""The parameter servers of a host: their processes, and where slices should be."""
