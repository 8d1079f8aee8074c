"""Drills: a training, broken on purpose from a seed, and proof of what came of it.

The engine:
engine.py     takes a run to its end while a plan breaks it
nemesis.py    does the faults, from outside, and undoes those that do not last
ground.py     where the runs take place: one host, or several in network namespaces; the storage
rig.py        the starter inside each worker: writes the trace, flips bits when ordered to
trace.py      what the rig wrote: who applied which step when, with which bits
checking.py   compares with the quiet run, promise by promise (pure); suspicion.py: what may have broken one

`holdfast drill`, for a user's own script:
plan.py       what is asked for: workers, faults, for how long, the seed
catalogue.py  every fault in a line or two, and why this machine cannot do it, if it cannot
schedule.py   plan and seed -> which fault when and to whom (pure); by_time.py: that, as a plan for the engine
figures.py    recovery times, goodput, throughput (pure)
report.py, plots.py   one HTML file; the figures for programs
conduct.py    all of it, in order

Other plans are in tests/soak: faults at steps, a flipped bit, kills at the stages of a save.
"""
