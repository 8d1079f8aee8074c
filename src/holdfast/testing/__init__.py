"""For tests of your own, and under `holdfast drill`: start a run, see it from outside, break it.

observed_run.py  a run of real processes: who lives, who is a member, how far it is, with which digest it ended
switchboard.py   hosts in network namespaces on this machine, and the network between them, which can be cut
bit_flips.py     one bit of one number, as hardware that lies would flip it
"""
