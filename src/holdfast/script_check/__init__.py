"""`holdfast check`: whether a script is exact, found out in seconds, before a cluster sees it.

Two processes run the script's first steps. The first has its shards computed again: fetched another way, in another
order, from a restored snapshot (recomputing.py). The second begins with the state that the first has after some of
them, as a worker does that joins (joining_in.py). What both write down (notes.py) is compared (judging.py, pure).
"""
