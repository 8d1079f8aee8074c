"""Parameter servers: parameters in slices, each kept and updated by servers that replicate its updates.

port.py             what a worker has of the servers
memory.py           its twin in one process
replicated.py       what a replicated log carries: a port
parameter_slice.py  a slice's parameters as such a state: its updates, its reads
slicing.py          which part of which parameter a slice has (pure)
cutting.py          between a worker's parameters and the slices' payloads
recipe.py           the user's optimizer as data, so that a server can build it for a slice
slice_state.py      a slice's parameters and optimizer, and an update applied to them
"""
