"""holdfast.launch: a function trained by several workers from a notebook or a script. No torch until it is needed."""
