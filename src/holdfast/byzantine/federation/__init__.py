"""Federated learning in one process, with hostile clients: to see what a rule is worth before it is trusted.

data.py has the images and deals them to clients, clients.py computes all clients' updates at once, rounds.py is one
training, choices.py many of them, plots.py draws.
"""
