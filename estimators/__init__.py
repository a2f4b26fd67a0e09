"""Spark ML stages that train PyTorch networks, imported on first use, so a job's --help needs no torch."""

from typing import TYPE_CHECKING

from ringspark.lazy_names import export_lazily

if TYPE_CHECKING:
    from ringspark.estimators.failures import TrainingCancelledError as TrainingCancelledError
    from ringspark.estimators.failures import WorkerError as WorkerError
    from ringspark.estimators.options.compression import BF16 as BF16
    from ringspark.estimators.options.compression import FP16 as FP16
    from ringspark.estimators.options.compression import QSGD as QSGD
    from ringspark.estimators.options.compression import GradiVeQ as GradiVeQ
    from ringspark.estimators.options.compression import PowerSGD as PowerSGD
    from ringspark.estimators.options.compression import RandomK as RandomK
    from ringspark.estimators.options.compression import Sign as Sign
    from ringspark.estimators.options.compression import Sparsify as Sparsify
    from ringspark.estimators.options.compression import SufficientFactors as SufficientFactors
    from ringspark.estimators.options.compression import TopK as TopK
    from ringspark.estimators.options.compression import Uncompressed as Uncompressed
    from ringspark.estimators.options.finetuning import LoRA as LoRA
    from ringspark.estimators.options.finetuning import Pretrained as Pretrained
    from ringspark.estimators.options.mesh import Mesh as Mesh
    from ringspark.estimators.options.mesh import Pipeline as Pipeline
    from ringspark.estimators.options.privacy import Privacy as Privacy
    from ringspark.estimators.options.scaling import ScaleLearningRate as ScaleLearningRate
    from ringspark.estimators.options.sync import AllReduce as AllReduce
    from ringspark.estimators.options.sync import DiLoCo as DiLoCo
    from ringspark.estimators.options.sync import ElasticAveraging as ElasticAveraging
    from ringspark.estimators.options.sync import Hogwild as Hogwild
    from ringspark.estimators.options.sync import LocalSGD as LocalSGD
    from ringspark.estimators.options.sync import ParameterServer as ParameterServer
    from ringspark.estimators.options.sync import Zero as Zero
    from ringspark.estimators.torch_estimator import TorchClassifier as TorchClassifier
    from ringspark.estimators.torch_estimator import TorchEstimator as TorchEstimator
    from ringspark.estimators.torch_estimator import TorchRegressor as TorchRegressor
    from ringspark.estimators.torch_model import TorchClassificationModel as TorchClassificationModel
    from ringspark.estimators.torch_model import TorchModel as TorchModel
    from ringspark.estimators.torch_model import TorchRegressionModel as TorchRegressionModel
    from ringspark.estimators.training.callbacks import Callback as Callback
    from ringspark.estimators.training.callbacks import TrainingState as TrainingState
    from ringspark.extras.planning import ParallelismPlan as ParallelismPlan
    from ringspark.extras.planning import ScalingPlan as ScalingPlan
    from ringspark.extras.planning import fit_scaling as fit_scaling
    from ringspark.extras.planning import plan_parallelism as plan_parallelism
    from ringspark.extras.planning import plan_scaling as plan_scaling
    from ringspark.extras.planning.memory.plan import plan_memory as plan_memory
    from ringspark.extras.planning.memory.report import MemoryPlan as MemoryPlan
    from ringspark.extras.pretraining.autoencoder import TorchAutoencoder as TorchAutoencoder
    from ringspark.extras.pretraining.autoencoder import TorchAutoencoderModel as TorchAutoencoderModel
    from ringspark.extras.privacy.cpsgd_options import CpSGD as CpSGD
    from ringspark.extras.serving.served_model import load_stage as load_stage
    from ringspark.extras.windows.sequence_windows import SequenceWindows as SequenceWindows

__getattr__, __dir__, __all__ = export_lazily(__name__)
