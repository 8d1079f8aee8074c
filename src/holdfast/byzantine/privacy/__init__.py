"""Privacy beside robustness: sums of small random buckets of clients are all that a server sees, and the robust rule
combines the buckets.

dealing.py says who is in which bucket, fixed_point.py makes numbers whose sums are exact. client.py and bucket.py are
the two sides of a masked sum (messages.py), masked_round.py is the server's side of a whole round, exchange.py has
both sides talk in one process. ciphers.py and sharing.py are the only files that know cryptography. across.py has the
rule across buckets and what f means there; noise.py and accounting.py are differential privacy.
"""
