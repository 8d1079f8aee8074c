"""Parameter servers: parameters in slices, each kept and updated by servers that replicate its updates.

port.py             what a worker has of the servers
memory.py           its twin in one process
client.py           its real one; asking.py: who is asked, and asked again
replicated.py       what a replicated log carries: a port
parameter_slice.py  a slice's parameters as such a state: its updates, its reads
slicing.py          which part of which parameter a slice has (pure)
cutting.py          between a worker's parameters and the slices' payloads
recipe.py           the user's optimizer as data, so that a server can build it for a slice
slice_state.py      a slice's parameters and optimizer, and an update applied to them
server.py           a server's thread: its replicas and connections; serving.py: its process
replica.py          one replica at work; holding.py: captured consistently with the other slices
storing.py          where logs are kept: in memory or, durable.py, on disk
connections.py      what workers and other servers may ask; links.py, fetching.py: what a server asks of others
ledger_line.py      a server's line to the ledger; run_facts.py: what it knows from there; placing.py: where slices are
frames.py           heads and bodies on a connection; log_codec.py: the log's messages in them
buffers.py          memory for payloads; worker_memory.py: shared between processes of a host
"""
