"""Sides: runs on machines of their own that learn one model and meet in a folder (Decoupled DiLoCo)."""
