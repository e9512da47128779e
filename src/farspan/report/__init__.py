"""Reports of planned and measured values as text, tables, HTML pages and memory snapshots."""
