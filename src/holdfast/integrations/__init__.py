"""Other projects' programs on Holdfast's parts. Each has its own room, and is imported when it is used."""
