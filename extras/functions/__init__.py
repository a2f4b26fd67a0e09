"""`ringspark.run`: calls a function or runs a script on every rank of a gang of Spark tasks."""
