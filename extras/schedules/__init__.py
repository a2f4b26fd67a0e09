"""Pipeline schedules without a flush, and pipelines that pass sequence chunks."""
