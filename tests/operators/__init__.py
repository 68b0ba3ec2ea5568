"""What an operator runs beside leads, for real: Prometheus, promtool and Jaeger. `make operators-check` runs it all."""
