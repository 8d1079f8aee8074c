"""The options of `holdfast run`, each declared once: run.py has them, and everything else follows from there.

What follows: the command line and its help (cli/run_options.py), the checks (agent/settings.py), what a worker is told
(placement/environment.py), run.json and the command that takes a run over, and the tables of docs/reference/cli.md.
"""
