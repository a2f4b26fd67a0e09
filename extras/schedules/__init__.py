"""Pipeline schedules without a flush, and pipelines that pass on chunks of the sequence."""
