"""Parameter servers: parameters in slices, each kept and updated by servers that replicate its updates.

slicing.py       which part of which parameter a slice has (pure)
recipe.py        the user's optimizer as data, so that a server can build it for a slice
slice_state.py   a slice's parameters and optimizer, and an update applied to them
"""
