"""Parameter servers: parameters in slices, each kept and updated by servers that replicate its updates.

port.py             what a worker has of the servers
memory.py           its twin in one process
client.py           its real one; asking.py: who is asked, and asked again; wires.py: what is under way to each server
replicated.py       what a replicated log carries: a port
parameter_slice.py  a slice's parameters as such a state: its updates, its reads
slicing.py          which part of which parameter a slice has (pure)
cutting.py          between a worker's parameters and the slices' payloads
codecs.py           how gradients travel over slow links; compressing.py: what they leave out is sent later
units.py            which worker makes which step, and when it may begin (pure); units_state.py: replicated
recipe.py           the user's optimizer as data, so that a server can build it for a slice
slice_state.py      a slice's parameters and optimizer, and an update applied to them
server.py           a server's thread: its replicas and connections; serving.py: its process
account.py          what a server tells of itself: its slices, its logs, how long the others take
gathering.py        with which servers a run begins
replica.py          one replica at work; holding.py: captured consistently with the other slices
storing.py          where logs are kept: in memory or, durable.py, on disk
connections.py      what workers and other servers may ask; links.py, fetching.py: what a server asks of others
ledger_line.py      a server's line to the ledger; run_facts.py: what it knows from there; placing.py: where slices are
frames.py           heads and bodies on a connection; log_codec.py: the log's messages in them
buffers.py          memory for payloads; worker_memory.py: shared between processes of a host
free_memory.py      how much more there is, of the machine or of a container
"""
