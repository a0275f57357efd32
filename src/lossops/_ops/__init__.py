"""What torch must know of the operators beyond their kernels; docs/design.md draws the modules."""
