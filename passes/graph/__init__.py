"""Words and tools for graphs, which passes are written with. There is no pass here."""
