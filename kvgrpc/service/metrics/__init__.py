"""Metrics of a lead, for Prometheus.

`families` is the table of all, `records` counts what happens, `readings` reads the present state at a scrape, and
`endpoint` serves both over HTTP.
"""
