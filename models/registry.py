"""Import paths of the networks that ship with ringspark, by name.

A new network needs a line here and a line of example arguments in `tests/models/test_contract.py`.
"""

MODELS: dict[str, str] = {
    "embedding_mean": "ringspark.extras.networks.embedding_mean:EmbeddingMean",
    "linear": "ringspark.models.mlp:Linear",
    "mlp": "ringspark.models.mlp:MLP",
    "recurrent": "ringspark.extras.networks.recurrent:Recurrent",
    "resnet": "ringspark.extras.networks.resnet:ResNet",
    "tabm": "ringspark.extras.tables.tabm:TabM",
    "tabpack": "ringspark.extras.tables.tabpack:TabPack",
    "tabular": "ringspark.extras.tables.tabular:TabularNet",
    "tabular_ensemble": "ringspark.extras.tables.tabular:TabularEnsemble",
    "transformer_classifier": "ringspark.models.transformer:TransformerClassifier",
    "transformer_lm": "ringspark.models.transformer:TransformerLM",
}
