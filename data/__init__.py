"""Files that ship with the package: the embedded default model."""
