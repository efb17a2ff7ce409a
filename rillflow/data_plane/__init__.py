"""Data plane: a table and a store that pass rows between stages which do not wait for each other."""
