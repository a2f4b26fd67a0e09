"""`ringspark.run`: any function as a gang on Spark."""
