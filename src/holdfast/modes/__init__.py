"""Ways to train together. `exact` gives the same bits whatever fails; others are to come (DESIGN.md, section 5)."""
