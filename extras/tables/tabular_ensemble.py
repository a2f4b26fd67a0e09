"""Where saved networks find `TabularEnsemble`."""

from ringspark.extras.tables.tabular import TabularEnsemble as TabularEnsemble
