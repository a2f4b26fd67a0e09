"""Pipeline schedules without a flush, and pipelines that exchange sequence chunks."""
