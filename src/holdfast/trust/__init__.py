"""How a connection proves that it belongs to the run, and how nobody else can read or change what it carries.

keys.py holds what a run's members have in common and strangers have not; handshake.py proves that both ends know the
secret; tls.py wraps connections between hosts; issuing.py makes keys. See docs/how-to/keys.md.
"""
