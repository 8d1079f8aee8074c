"""Drills: a user's own training, broken on purpose from a seed, and proof of what came of it.

plan.py       what is asked for: workers, faults, for how long, the seed
catalogue.py  every fault in a line or two, and why this machine cannot do it, if it cannot
schedule.py   plan and seed -> which fault when and to whom (pure)
rig.py        the starter inside each worker: writes the trace, flips bits when ordered to
trace.py      what the rig wrote: who applied which step when, with which bits
ground.py     where the runs take place: one host, or several in network namespaces; the storage
injecting.py  does the faults, from outside
checking.py   compares with the quiet run, promise by promise (pure)
figures.py    recovery times, goodput, throughput (pure)
report.py, plots.py   one HTML file; the figures for programs
conduct.py    all of it, in order
"""
