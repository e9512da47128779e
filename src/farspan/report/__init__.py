"""Reports of planned and measured values: text, tables, pages, snapshots."""
