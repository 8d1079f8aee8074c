"""How the training's state comes to a worker, goes to joiners, and is saved."""
