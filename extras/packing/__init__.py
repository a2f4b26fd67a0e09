"""`ringspark pack`: an archive of a Python environment for Spark's executors.

venv-pack needs the same Python at the same path on every executor, and conda-pack needs conda. This archive
contains the interpreter, its standard library and their libraries, so executors need no Python at all.
"""

from ringspark.extras.packing.pack import pack as pack
