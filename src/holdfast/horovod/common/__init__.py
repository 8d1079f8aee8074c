"""Names that scripts import from `horovod.common`."""
