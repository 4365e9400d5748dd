"""Other libraries' own objects and layers, each in a module of its own; none is imported here."""
