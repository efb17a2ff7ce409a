"""Rows between stages that do not wait for each other: a table, a store, and who may read what when."""
