"""Servers that agree although some of them lie: 3f+1 aggregation servers, a signed agreement on each round's updates,
and a chain of round records that anyone can verify afterwards. docs/explanation/server-agreement.md says how and why.

Pure: canonical.py (bytes that are signed), federation.py (who takes part), statements.py (what is signed),
checking.py (what proves what), machine.py with ballots.py and round_state.py (one server), messages.py, misbehaving.py.
They act: signing.py (Ed25519), storing.py, links.py, server.py, aggregating.py, client.py, processes.py, verifying.py.
"""
