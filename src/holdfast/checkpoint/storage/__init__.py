"""Where checkpoints live: a local directory, an object store, HDFS. All behind one port, with one contract suite."""
