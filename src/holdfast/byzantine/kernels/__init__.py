"""What is computed over the columns of updates: compiled where there is a compiler, else with torch, with the same
bits.
"""
