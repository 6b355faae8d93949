"""What the manifests of `deploy/` may hold, as JSON schemas of the parts they use.

Written from the references of Kubernetes (v1.31), Vertex AI (`CustomJobSpec`, v1) and
Amazon SageMaker (`CreateTrainingJob`): names, types and what has to be there. A name
that is not used there yet is refused; add it from the reference.
"""

TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 1}
LABELS = {"type": "object", "additionalProperties": TEXT, "minProperties": 1}
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}


def record(required, **optional):
    """Returns the schema of an object of these fields and no others."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def several(items, **bounds):
    """Returns the schema of a list that is not empty."""
    return {"type": "array", "items": items, "minItems": 1, **bounds}


_CONTAINER = record(
    {"name": NAME, "image": TEXT},
    command=several(TEXT),
    args=several(TEXT),
    env=several(record({"name": TEXT, "value": {"type": "string"}})),
    ports=several(record({"containerPort": PORT})),
    resources=record({}, limits={"type": "object"}, requests={"type": "object"}),
    volumeMounts=several(record({"name": NAME, "mountPath": TEXT})),
)
_POD = record(
    # A pod of a job may not have the restart policy that pods have by default.
    {
        "containers": several(_CONTAINER),
        "restartPolicy": {"enum": ["OnFailure", "Never"]},
    },
    subdomain=NAME,
    volumes=several(
        record({"name": NAME, "persistentVolumeClaim": record({"claimName": NAME})})
    ),
)
JOB = record(
    {
        "apiVersion": {"const": "batch/v1"},
        "kind": {"const": "Job"},
        "metadata": record({"name": NAME}),
        "spec": record(
            {"template": record({"spec": _POD}, metadata=record({"labels": LABELS}))},
            completionMode={"enum": ["Indexed", "NonIndexed"]},
            completions=COUNT,
            parallelism=COUNT,
            backoffLimit=COUNT,
        ),
    }
)
SERVICE = record(
    {
        "apiVersion": {"const": "v1"},
        "kind": {"const": "Service"},
        "metadata": record({"name": NAME}),
        "spec": record(
            {"selector": LABELS, "ports": several(record({"port": PORT}, name=NAME))},
            clusterIP={"const": "None"},
            publishNotReadyAddresses={"type": "boolean"},
        ),
    }
)
_POOL = record(
    {
        "machineSpec": record(
            {"machineType": TEXT}, acceleratorType=TEXT, acceleratorCount=COUNT
        ),
        "containerSpec": record(
            {"imageUri": TEXT}, command=several(TEXT), args=several(TEXT)
        ),
        "replicaCount": COUNT,
    }
)
VERTEX = record(
    {"workerPoolSpecs": several(_POOL, maxItems=4)},
    scheduling=record(
        {},
        restartJobOnWorkerRestart={"type": "boolean"},
        timeout={"type": "string", "pattern": "^[0-9]+s$"},
    ),
)
_CHANNEL = record(
    {
        "ChannelName": {"type": "string", "pattern": "^[A-Za-z0-9.\\-_]{1,64}$"},
        "DataSource": record(
            {
                "FileSystemDataSource": record(
                    {
                        "FileSystemId": TEXT,
                        "FileSystemType": {"enum": ["EFS", "FSxLustre"]},
                        "FileSystemAccessMode": {"enum": ["rw", "ro"]},
                        "DirectoryPath": TEXT,
                    }
                )
            }
        ),
    }
)
SAGEMAKER = record(
    {
        "TrainingJobName": {"type": "string", "pattern": "^[A-Za-z0-9][-A-Za-z0-9]*$"},
        "RoleArn": TEXT,
        "AlgorithmSpecification": record(
            {"TrainingInputMode": {"enum": ["Pipe", "File", "FastFile"]}},
            TrainingImage=TEXT,
        ),
        "OutputDataConfig": record({"S3OutputPath": TEXT}),
        "ResourceConfig": record(
            {"InstanceType": TEXT, "InstanceCount": COUNT, "VolumeSizeInGB": COUNT}
        ),
        "StoppingCondition": record({"MaxRuntimeInSeconds": COUNT}),
    },
    HyperParameters={"type": "object", "additionalProperties": {"type": "string"}},
    InputDataConfig=several(_CHANNEL),
    VpcConfig=record({"SecurityGroupIds": several(TEXT), "Subnets": several(TEXT)}),
)
