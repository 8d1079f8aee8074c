"""The run's small, strongly consistent record: who is here, which view holds, whether it is finished.

    port.py        what every ledger offers; callers depend on this and on nothing else here
    memory.py      a ledger inside one process: a run of one worker, and tests
    embedded.py    a ledger for one host: a durable server in the agent, clients in the workers

Below those: machine.py decides (pure), journal.py makes decisions durable, trust/ proves that a connection
belongs to the run, wire.py is what is said on it, requests.py what each call means, connection.py and server.py serve,
channel.py and client.py ask.
"""
