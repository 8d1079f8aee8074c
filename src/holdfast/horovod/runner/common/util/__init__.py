"""Names that scripts import from `horovod.runner`."""
