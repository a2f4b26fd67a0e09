"""The networks that ship with ringspark, by name.

Values are import paths instead of classes, so listing a name costs no import, and a saved `ModelSpec`
holds the same string. `tests/models/test_contract.py` runs over every entry, so a new one needs a line
here and a line of example arguments there.
"""

MODELS: dict[str, str] = {
    "embedding_mean": "ringspark.models.embedding_mean:EmbeddingMean",
    "linear": "ringspark.models.linear:Linear",
    "mlp": "ringspark.models.mlp:MLP",
    "recurrent": "ringspark.models.recurrent:Recurrent",
    "resnet": "ringspark.models.resnet:ResNet",
    "tabular": "ringspark.models.tabular:TabularNet",
    "tabular_ensemble": "ringspark.models.tabular_ensemble:TabularEnsemble",
    "transformer_classifier": "ringspark.models.transformer:TransformerClassifier",
    "transformer_lm": "ringspark.models.transformer:TransformerLM",
}
