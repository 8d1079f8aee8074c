"""The rows of a table shard in memory: compiled where there is a compiler, else with numpy, with the same bits."""
