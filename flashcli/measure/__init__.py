"""How fast and how right: benchmarks, profiles, peers, and the records, tables and pictures made of them."""
