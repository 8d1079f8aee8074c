"""The vocabulary of Holdfast: views, shards, errors, event names, configuration. No torch and no IO here."""
