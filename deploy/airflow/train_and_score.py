"""An Airflow DAG: trains from a job file every day, then predicts new rows.

Copy this file into the DAG folder, and set four Airflow variables: `ringspark_job` (the job file),
`ringspark_model` (its `save.model`), `ringspark_rows` (a Parquet folder) and `ringspark_predictions` (the
output folder). The job file must set `save.overwrite: true`, so that the next day replaces the model. Without
`params.runUri` a retry trains again from the start. To resume instead, add `--resume` and a folder per day,
such as `--set params.runUri=/shared/runs/{{ ds }}`, to the command.

Airflow's workers need the command `ringspark`. To train on a cluster, use SparkSubmitOperator with
`jobs/command.py` and the same arguments.

Run: tests/deploy/test_orchestrators.py runs both tasks with `dag.test()`.
"""

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

with DAG("ringspark", schedule="@daily", catchup=False) as dag:
    train = BashOperator(
        task_id="train",
        retries=2,
        bash_command="ringspark train {{ var.value.ringspark_job }}",
    )
    score = BashOperator(
        task_id="score",
        bash_command="ringspark score {{ var.value.ringspark_model }} --overwrite "
        "--parquet {{ var.value.ringspark_rows }} --output {{ var.value.ringspark_predictions }}",
    )
    train >> score
