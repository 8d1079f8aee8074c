"""Data in files too large to shuffle whole: sources by number, the order of an epoch, packing and mixtures."""
