"""An Airflow DAG: trains a job file every day, then predicts new rows.

Copy this file into the folder of DAGs, and set the Airflow variables that it names. Airflow's workers need
the command `ringspark`; on a cluster, SparkSubmitOperator runs `jobs/command.py` with the same arguments.

Run: tests/deploy/test_orchestrators.py runs both tasks with `dag.test()`.
"""

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

with DAG("ringspark", schedule="@daily", catchup=False) as dag:
    train = BashOperator(
        task_id="train",
        retries=2,  # a run that was interrupted resumes from its last checkpoint
        bash_command="ringspark train {{ var.value.ringspark_job }}",
    )
    score = BashOperator(
        task_id="score",
        bash_command="ringspark score {{ var.value.ringspark_model }} --overwrite "
        "--parquet {{ var.value.ringspark_rows }} --output {{ var.value.ringspark_predictions }}",
    )
    train >> score
