"""Logs: durable segments on disk, and the replication of one slice's log as a pure machine.

configuration.py  who replicates a slice, and under which epoch; which log is the newest
messages.py       what goes into the machine and what comes out
machine.py        one replica of one slice's log
log_copy.py       its copy of the log: what is stored, committed and applied
tail.py           the entries after the snapshot
deduplication.py  which updates are applied already
leading.py        what a primary knows in its epoch: the others' progress, the lease, who waits
changing.py       a change of the configuration that the primary carries out
candidacy.py      how a replica finds the next primary
rules.py          times and limits
segments.py       a log on disk, in files of records, with group commit
frames.py         bytes with a length and a checksum, and how a torn end is told from damage
files.py          appending, syncing and locking
"""
