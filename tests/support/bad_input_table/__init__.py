"""Inputs that must be refused: each row does something and gives patterns of the error message."""

from bad_input_table.columns import COLUMNS, TEXTS, WINDOWS
from bad_input_table.jobs import JOB_LINES
from bad_input_table.meshes import MESHES
from bad_input_table.models import MODELS
from bad_input_table.networks import FINETUNING, NETWORKS
from bad_input_table.place import Place
from bad_input_table.runs import RUNS
from bad_input_table.settings import SETTINGS
from bad_input_table.shards import READING, TABLES, WRITING
from bad_input_table.table_fits import TABLE_FITS

__all__ = ["BAD_INPUTS", "OF_EXTRAS", "Place"]

BAD_INPUTS = [
    *WRITING,
    *READING,
    *COLUMNS,
    *TEXTS,
    *SETTINGS,
    *MESHES,
    *NETWORKS,
    *FINETUNING,
    *RUNS,
    *MODELS,
    *WINDOWS,
    *JOB_LINES,
    *TABLES,
    *TABLE_FITS,
]

TECHNIQUES = ("autoencoder", "inner columns", "shards")
# Names of the rows that `ringspark.extras` refuses.
OF_EXTRAS = frozenset(
    [
        "mesh: planned, and none fits",
        "text: nothing to learn from",
        *(row.name for row in WINDOWS),
        *(
            row.name
            for row in BAD_INPUTS
            if row.name.startswith(
                ("shards:", "autoencoder:", "contributions:", "inner columns:", "offset:", "tracking:")
            )
        ),
    ]
)
